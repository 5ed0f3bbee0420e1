"""Losses on noised clean latents: DPO and its variants, KTO, MaPO, RWR and SFT.

They see residuals (prediction - target) of the policy and the reference and a minibatch of
examples; the training loop evaluates the networks.
"""

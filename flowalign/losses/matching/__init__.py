"""Losses on noised clean latents: preferences (DPO, KTO, ...), SFT, and forward-process RL.

They see residuals (prediction - target) of the policy and the reference and a minibatch of
examples; the training loop evaluates the networks.
"""

"""Losses on noised clean latents: preferences (DPO, KTO, ...), SFT, and forward-process RL.

A loss reads columns of a batch, such as the residuals (prediction - target) of the policy and of
the reference. The training loop evaluates the networks.
"""

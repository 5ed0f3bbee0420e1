"""Losses on noised clean latents: preferences (DPO, KTO, ...), SFT, and forward-process RL.

A loss receives a minibatch of examples and the residuals (prediction - target) of the policy and
the reference. The training loop evaluates the networks.
"""

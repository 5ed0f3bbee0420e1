"""Losses on the denoising transitions of rollouts: the GRPO family and StepDPO.

A loss receives a minibatch of transitions and the velocity fields of the policy and the reference.
"""

"""Losses on the denoising transitions of rollouts: the GRPO family and StepDPO.

They see a minibatch of transitions, the policy's and the reference's velocity field, and nothing of
the loop that calls them.
"""

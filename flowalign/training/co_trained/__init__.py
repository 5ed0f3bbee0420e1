"""Train a policy by a learned reward whose head is refreshed on the policy's own rollouts."""

from flowalign.training.co_trained.recipe import CoTrained

__all__ = ["CoTrained"]

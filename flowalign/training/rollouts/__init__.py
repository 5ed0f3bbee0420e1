"""Sample requests, value the samples and compare their rewards, for all online recipes."""

from flowalign.training.rollouts.advantages import RewardMap

__all__ = ["RewardMap"]

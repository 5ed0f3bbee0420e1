"""Sample requests, value the samples and compare their rewards, for all online recipes."""

from flowalign.training.rollouts.spatial import RewardMap

__all__ = ["RewardMap"]

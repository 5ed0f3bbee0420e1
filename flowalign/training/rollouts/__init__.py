"""Sample requests, value the samples and compare their rewards, for all online recipes."""

from flowalign.training.rollouts.spatial import AttentionMap, RewardMap, SpatialCredit

__all__ = ["AttentionMap", "RewardMap", "SpatialCredit"]

"""Rewards: several reward models as one, what is optimised of them, and their server."""

from flowalign.rewards.composite import RewardFailure, Rewards
from flowalign.rewards.objectives import LogSigmoidCentred, Thresholds, TransformedValues

__all__ = [
    "LogSigmoidCentred",
    "RewardFailure",
    "Rewards",
    "Thresholds",
    "TransformedValues",
]

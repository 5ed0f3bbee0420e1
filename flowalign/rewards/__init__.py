"""Combine reward models, define objectives on their dimensions, and serve models over HTTP."""

from flowalign.rewards.checked import CheckedReward, RewardError, RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.rewards.function_reward import FunctionReward
from flowalign.rewards.objectives import LogSigmoidCentred, Thresholds, TransformedValues

__all__ = [
    "CheckedReward",
    "FunctionReward",
    "LogSigmoidCentred",
    "RewardError",
    "RewardFailure",
    "Rewards",
    "Thresholds",
    "TransformedValues",
]

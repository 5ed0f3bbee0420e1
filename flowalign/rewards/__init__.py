"""Combine reward models, define objectives on their dimensions, and serve models over HTTP.

The published reward models of `reward_models` are available here too, for scripts.
"""

from importlib import import_module
from typing import Any

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


def __getattr__(name: str) -> Any:
    """Return a class of `reward_models`, which this package does not import by itself."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(import_module("reward_models"), name)

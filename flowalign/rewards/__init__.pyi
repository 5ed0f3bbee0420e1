from reward_models import *  # noqa: F403

from .checked import (
    CheckedReward as CheckedReward,
    RewardError as RewardError,
    RewardFailure as RewardFailure,
)
from .composite import Rewards as Rewards
from .function_reward import FunctionReward as FunctionReward
from .objectives import (
    LogSigmoidCentred as LogSigmoidCentred,
    Thresholds as Thresholds,
    TransformedValues as TransformedValues,
)

"""Ask a policy with more than the prompt: levels of rewards, words of rewards, or a person."""

from flowalign.dressing.reward_levels import RewardLevels
from flowalign.dressing.reward_words import RewardWords
from flowalign.dressing.users import Users

__all__ = ["RewardLevels", "RewardWords", "Users"]

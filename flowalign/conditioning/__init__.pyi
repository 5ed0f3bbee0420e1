from .reward_levels import RewardLevels as RewardLevels
from .reward_words import RewardWords as RewardWords
from .user_conditioning import Users as Users

from .distillation.tdm_recipe import TDM as TDM
from .distillation.tdm_settings import Fake as Fake, RewardSurrogate as RewardSurrogate
from .online_reward.online_reward_recipe import OnlineReward as OnlineReward

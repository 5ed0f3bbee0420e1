from .clip_pairs.dense_pairs import DensePairs as DensePairs
from .clip_pairs.local_pairs import LocalPairs as LocalPairs
from .distillation.tdm_recipe import TDM as TDM
from .distillation.tdm_settings import Fake as Fake, RewardSurrogate as RewardSurrogate
from .online_reward.online_reward_recipe import OnlineReward as OnlineReward
from .span_grpo import SpanGRPO as SpanGRPO

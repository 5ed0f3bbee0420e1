from .clip_pairs.dense_dpo import DenseDPO as DenseDPO
from .clip_pairs.dense_pairs import DensePairs as DensePairs
from .clip_pairs.local_dpo import LocalDPO as LocalDPO
from .clip_pairs.local_pairs import LocalPairs as LocalPairs
from .conditioning.reward_levels import RewardLevels as RewardLevels
from .conditioning.reward_words import RewardWords as RewardWords
from .distillation.tdm_recipe import TDM as TDM
from .distillation.tdm_settings import Fake as Fake, RewardSurrogate as RewardSurrogate
from .flowbp_bridge import FlowBPBridge as FlowBPBridge
from .flowbp_lagrange import (
    DirichletLeaps as DirichletLeaps,
    FlowBPLagrange as FlowBPLagrange,
)
from .focus_dpo import FocusDPO as FocusDPO
from .hyper_align import HyperAlign as HyperAlign, HyperAlignFlux1 as HyperAlignFlux1
from .kvpo import KVPO as KVPO
from .omni_nft import OmniNFT as OmniNFT
from .online_reward.online_reward_recipe import OnlineReward as OnlineReward
from .span_grpo import SpanGRPO as SpanGRPO
from .users.personal import PersonalSD15 as PersonalSD15, PersonalSDXL as PersonalSDXL
from .users.user_conditioning import Users as Users

from .regional_dpo import DenseDPO as DenseDPO
from .clip_pairs.generators import DensePairs as DensePairs
from .regional_dpo import LocalDPO as LocalDPO
from .clip_pairs.generators import LocalPairs as LocalPairs
from .conditioning import RewardLevels as RewardLevels
from .conditioning import RewardWords as RewardWords
from .tdm import TDM as TDM
from .tdm_parts import Fake as Fake, RewardSurrogate as RewardSurrogate
from .flowbp import FlowBPBridge as FlowBPBridge
from .flowbp import (
    DirichletLeaps as DirichletLeaps,
    FlowBPLagrange as FlowBPLagrange,
)
from .regional_dpo import FocusDPO as FocusDPO
from .hyper_align import HyperAlign as HyperAlign, HyperAlignFlux1 as HyperAlignFlux1
from .kvpo import KVPO as KVPO
from .omni_nft import OmniNFT as OmniNFT
from .online_reward import OnlineReward as OnlineReward
from .span_grpo import SpanGRPO as SpanGRPO
from .personal import PersonalSD15 as PersonalSD15, PersonalSDXL as PersonalSDXL
from .conditioning import Users as Users

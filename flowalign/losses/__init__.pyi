from .matching.advantages import AWM as AWM
from .matching.groups import CRD as CRD
from .matching.groups import DGPO as DGPO
from .matching.pairs import DPO as DPO, AutoBeta as AutoBeta
from .matching.advantages import FDFO as FDFO
from .matching.scaled_losers import GradientBalance as GradientBalance
from .matching.kto import KTO as KTO
from .matching.pairs import LinearDPO as LinearDPO
from .matching.links import IPO as IPO, Hinge as Hinge, Link as Link, Sigmoid as Sigmoid
from .matching.pairs import MaPO as MaPO
from .matching.mend import MEND as MEND
from .matching.advantages import NFT as NFT
from .matching.opd import OPD as OPD
from .matching.advantages import OPSD as OPSD
from .matching.fits import RWR as RWR
from .matching.scaled_losers import Safeguard as Safeguard
from .matching.fits import SFT as SFT
from .policy_gradient.grpo import GRPO as GRPO
from .policy_gradient.step_dpo import StepDPO as StepDPO
from .policy_gradient.grpo import (
    DivergenceMask as DivergenceMask,
    LogHinge as LogHinge,
    PPOClip as PPOClip,
    RatioNorm as RatioNorm,
    RewardClip as RewardClip,
    Surrogate as Surrogate,
)
from .reward_gradient import Distance as Distance, Margin as Margin, Maximise as Maximise

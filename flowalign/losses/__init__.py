"""Losses that update a policy, one file per published loss.

`policy_gradient` learns from transitions of rollouts, `matching` from noised clean latents,
`reward_gradient` from the gradient of rewards.
"""

from flowalign.losses.matching.awm import AWM
from flowalign.losses.matching.crd import CRD
from flowalign.losses.matching.dense_dpo import DenseDPO
from flowalign.losses.matching.dgpo import DGPO
from flowalign.losses.matching.dpo import DPO, AutoBeta
from flowalign.losses.matching.flow_awr import FlowAWR
from flowalign.losses.matching.focus_dpo import FocusDPO
from flowalign.losses.matching.gradient_balance import GradientBalance
from flowalign.losses.matching.kto import KTO
from flowalign.losses.matching.kvpo import KVPO
from flowalign.losses.matching.linear_dpo import LinearDPO
from flowalign.losses.matching.links import IPO, Hinge, Link, Sigmoid
from flowalign.losses.matching.local_dpo import LocalDPO
from flowalign.losses.matching.mapo import MaPO
from flowalign.losses.matching.nft import NFT
from flowalign.losses.matching.norm_guard import NormGuard
from flowalign.losses.matching.opd import OPD
from flowalign.losses.matching.ram import RAM
from flowalign.losses.matching.rwr import RWR
from flowalign.losses.matching.safeguard import Safeguard
from flowalign.losses.matching.sft import SFT
from flowalign.losses.matching.vgrpo import VGRPO
from flowalign.losses.policy_gradient.grpo import GRPO
from flowalign.losses.policy_gradient.span_grpo import SpanGRPO
from flowalign.losses.policy_gradient.step_dpo import StepDPO
from flowalign.losses.policy_gradient.surrogates import (
    DivergenceMask,
    LayerTuning,
    LogHinge,
    PPOClip,
    RatioNorm,
    RewardClip,
    Surrogate,
)
from flowalign.losses.reward_gradient import Distance, Margin, Maximise, RewardLoss

__all__ = [
    "VGRPO",
    "RAM",
    "NormGuard",
    "NFT",
    "OPD",
    "KVPO",
    "FlowAWR",
    "FocusDPO",
    "DGPO",
    "CRD",
    "AWM",
    "AutoBeta",
    "DPO",
    "DenseDPO",
    "Distance",
    "DivergenceMask",
    "GRPO",
    "GradientBalance",
    "Hinge",
    "IPO",
    "KTO",
    "LayerTuning",
    "LinearDPO",
    "Link",
    "LocalDPO",
    "LogHinge",
    "MaPO",
    "Margin",
    "Maximise",
    "PPOClip",
    "RWR",
    "RatioNorm",
    "RewardClip",
    "RewardLoss",
    "SFT",
    "Safeguard",
    "Sigmoid",
    "SpanGRPO",
    "StepDPO",
    "Surrogate",
]

"""Connections: on which path the gradient of a reward reaches the policy. One file per method."""

from flowalign.connections.align_prop import AlignProp
from flowalign.connections.direct_align import DirectAlign
from flowalign.connections.draft import DRaFT
from flowalign.connections.draft_lv import DRaFTLV
from flowalign.connections.drtune import DRTune
from flowalign.connections.flowbp_bridge import FlowBPBridge
from flowalign.connections.flowbp_lagrange import FlowBPLagrange
from flowalign.connections.flowbp_sparse import FlowBPSparse
from flowalign.connections.leap_align import LeapAlign
from flowalign.connections.leaps import DirichletLeaps, Leaps, UniformLeaps
from flowalign.connections.refl import ReFL
from flowalign.connections.vader import VADER

__all__ = [
    "AlignProp",
    "DRTune",
    "DRaFT",
    "DRaFTLV",
    "DirectAlign",
    "DirichletLeaps",
    "FlowBPBridge",
    "FlowBPLagrange",
    "FlowBPSparse",
    "LeapAlign",
    "Leaps",
    "ReFL",
    "UniformLeaps",
    "VADER",
]

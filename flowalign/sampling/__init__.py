"""Sample trajectories: the one denoising loop, and which of its steps are random or shared."""

from flowalign.sampling.branching import Branching, Chain, Comb, Layout, Tree
from flowalign.sampling.calibration import Calibration
from flowalign.sampling.completion import BatchedCompletion, complete
from flowalign.sampling.frame_windows import FixedFrames, FrameWindow, RandomFrames
from flowalign.sampling.guidance import Euphonium, FlowNRG, RewardGuidance
from flowalign.sampling.kept import Storage
from flowalign.sampling.rollout import concat_trajectories, empty_trajectory, generate, sample
from flowalign.sampling.sde_windows import (
    AllButLast,
    Backward,
    Fixed,
    Geometric,
    NoSteps,
    Random,
    RandomSubset,
    SDEWindow,
    Sliding,
)
from flowalign.sampling.settings import Sampling

__all__ = [
    "AllButLast",
    "Backward",
    "BatchedCompletion",
    "Branching",
    "Calibration",
    "Chain",
    "Comb",
    "Euphonium",
    "Fixed",
    "FlowNRG",
    "NoSteps",
    "FixedFrames",
    "FrameWindow",
    "Geometric",
    "Layout",
    "Random",
    "RandomFrames",
    "RandomSubset",
    "RewardGuidance",
    "SDEWindow",
    "Sampling",
    "Sliding",
    "Storage",
    "Tree",
    "complete",
    "concat_trajectories",
    "empty_trajectory",
    "generate",
    "sample",
]

"""Train by matching losses of noised clean latents, on stored preferences or own rollouts."""

from flowalign.training.ema import Ramp
from flowalign.training.matching.own_states import OwnStates
from flowalign.training.matching.points import ForwardNoise, GuidedStep, Points, Visited
from flowalign.training.matching.recipe import Matching
from flowalign.training.matching.references import (
    Average,
    EMAReference,
    FrozenBase,
    GuidedReference,
    PeriodicCopy,
    Reference,
    Teacher,
)
from flowalign.training.matching.rollouts import Rollouts
from flowalign.training.matching.scored_groups import ScoredGroups
from flowalign.training.matching.source import Batch, BatchStream, DataSource
from flowalign.training.matching.stored import StoredDataset
from flowalign.training.matching.times import LogitNormal, SamplerGrid, Times, Uniform

__all__ = [
    "Average",
    "Batch",
    "BatchStream",
    "DataSource",
    "EMAReference",
    "ForwardNoise",
    "FrozenBase",
    "GuidedReference",
    "GuidedStep",
    "LogitNormal",
    "Matching",
    "OwnStates",
    "PeriodicCopy",
    "Points",
    "Ramp",
    "Reference",
    "Rollouts",
    "SamplerGrid",
    "ScoredGroups",
    "StoredDataset",
    "Teacher",
    "Times",
    "Uniform",
    "Visited",
]

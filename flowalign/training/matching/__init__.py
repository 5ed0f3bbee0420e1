"""Train by matching losses of noised clean latents, on stored preferences or own rollouts."""

from flowalign.training.ema import Ramp
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
    "FrozenBase",
    "GuidedReference",
    "LogitNormal",
    "Matching",
    "PeriodicCopy",
    "Ramp",
    "Reference",
    "Rollouts",
    "SamplerGrid",
    "ScoredGroups",
    "StoredDataset",
    "Teacher",
    "Times",
    "Uniform",
]

"""Train with matching losses on noised clean latents, from stored preferences or rollouts."""

from flowalign.training.ema import Ramp
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.on_policy_states import OnPolicyStates
from flowalign.training.matching.reference_models import (
    Average,
    EMAReference,
    FrozenBase,
    GuidedReference,
    PeriodicCopy,
    ReferenceModel,
    Teacher,
)
from flowalign.training.matching.reward_ascent import RewardAscent
from flowalign.training.matching.rollouts import Rollouts
from flowalign.training.matching.scored_groups import ScoredGroups
from flowalign.training.matching.source import Batch, BatchStream, DataSource
from flowalign.training.matching.state_source import (
    ForwardNoise,
    GuidedStep,
    StateSource,
    VisitedStates,
)
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
    "OnPolicyStates",
    "PeriodicCopy",
    "StateSource",
    "Ramp",
    "ReferenceModel",
    "RewardAscent",
    "Rollouts",
    "SamplerGrid",
    "ScoredGroups",
    "StoredDataset",
    "Teacher",
    "Times",
    "Uniform",
    "VisitedStates",
]

from .on_policy_states import OnPolicyStates as OnPolicyStates
from .reference_models import (
    EMAReference as EMAReference,
    FrozenBase as FrozenBase,
    GuidedReference as GuidedReference,
    PeriodicCopy as PeriodicCopy,
    Teacher as Teacher,
)
from .reward_moves import RewardAscent as RewardAscent, RewardProposals as RewardProposals
from .rollouts import Rollouts as Rollouts
from .scored_groups import ScoredGroups as ScoredGroups
from .states import GuidedStep as GuidedStep, VisitedStates as VisitedStates
from .stored import StoredDataset as StoredDataset
from .states import LogitNormal as LogitNormal, SamplerGrid as SamplerGrid, Uniform as Uniform

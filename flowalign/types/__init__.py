"""Define the values that pass between stages and the interfaces of plug-ins; import them from here.

Axes, used in every annotation of the package:

    P  prompts on this rank               G  samples per prompt (the group)
    B  = P * G samples, prompt-major, so sample b answers request b // G
    S  states of a trajectory, T = S - 1 transitions; transition k maps state k to state k + 1
    R  reward dimensions                  F  video frames, 1 for an image

Time is the flow-matching sigma: sigma_0 = 1 is noise, sigma_T = 0 is data, and x_sigma = (1 -
sigma) * data + sigma * noise, hence velocity v = dx / dsigma = noise - data. `k` is always an index
and `sigma` always a time.
"""

from flowalign.types.connection import Connected, Connection, Replay
from flowalign.types.credit import CreditEstimator, PastOutcomes, StepCredit, ValueFunction
from flowalign.types.dressing import (
    Dressing,
    PromptGuidance,
    check_form,
    check_words,
    conditioning,
    shown,
    with_words,
)
from flowalign.types.encoding import EncodesApart, PromptStore
from flowalign.types.latent_reward import LatentReward, NoisyBackbone
from flowalign.types.matching import (
    ALONE,
    Examples,
    Label,
    LossContext,
    MatchingLoss,
    Requirements,
    Residuals,
    Transitions,
)
from flowalign.types.media_batch import MediaBatch
from flowalign.types.offload import Offload, Offloadable
from flowalign.types.policy import (
    Exportable,
    ExportDtype,
    ExportTarget,
    ModelPlan,
    Personal,
    Policy,
    Renders,
    Saving,
    Takes,
    VelocityField,
)
from flowalign.types.quantization import Quantizable, Quantization
from flowalign.types.request import Dress, Reference, Request, plain_requests, prompts_of
from flowalign.types.reward import (
    Column,
    Loadable,
    Need,
    RewardModel,
    RewardOutput,
    RewardSpec,
)
from flowalign.types.reward_heads import (
    Backbone,
    Fit,
    Fittable,
    Head,
    HeadNetwork,
    Refreshable,
)
from flowalign.types.sharding import ContextParallel, Shardable, Sharding
from flowalign.types.speed import Accelerated, Reduced, Speed
from flowalign.types.trajectory import Cond, SharedRows, Trajectory
from flowalign.types.transitions import BestTransition, Minibatch, PolicyLoss
from flowalign.utils.ranges import (
    Decay,
    FiniteFloat,
    Guidance,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    UnitInterval,
)

__all__ = [
    "Decay",
    "FiniteFloat",
    "Guidance",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Quantizable",
    "Quantization",
    "Range",
    "Seed",
    "UnitInterval",
    "ALONE",
    "Accelerated",
    "Backbone",
    "BestTransition",
    "Column",
    "Cond",
    "ContextParallel",
    "Connected",
    "Connection",
    "CreditEstimator",
    "Residuals",
    "Examples",
    "Dress",
    "Dressing",
    "Fit",
    "Fittable",
    "Head",
    "HeadNetwork",
    "Label",
    "LatentReward",
    "Loadable",
    "LossContext",
    "MatchingLoss",
    "MediaBatch",
    "Minibatch",
    "ModelPlan",
    "Need",
    "NoisyBackbone",
    "PastOutcomes",
    "EncodesApart",
    "Exportable",
    "ExportDtype",
    "ExportTarget",
    "Offload",
    "Offloadable",
    "Personal",
    "Policy",
    "PolicyLoss",
    "PromptGuidance",
    "PromptStore",
    "Reduced",
    "Reference",
    "Renders",
    "Replay",
    "Request",
    "Refreshable",
    "RewardModel",
    "RewardOutput",
    "RewardSpec",
    "Saving",
    "Shardable",
    "Sharding",
    "Speed",
    "StepCredit",
    "Requirements",
    "SharedRows",
    "Takes",
    "Trajectory",
    "Transitions",
    "ValueFunction",
    "VelocityField",
    "check_form",
    "check_words",
    "conditioning",
    "plain_requests",
    "prompts_of",
    "shown",
    "with_words",
]

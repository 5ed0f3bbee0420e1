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

from flowalign.types.batch import COLUMNS, Batch
from flowalign.types.credit import (
    CreditEstimator,
    GradientPath,
    PastOutcomes,
    Replay,
    SampleView,
    StepCredit,
    ValueFunction,
)
from flowalign.types.losses import (
    ALONE,
    Fields,
    LossContext,
    MatchingLoss,
    PolicyLoss,
    step_of,
    steps_of,
)
from flowalign.types.model import (
    Attention,
    DifferentiableDecoder,
    InputSpec,
    ModelPlan,
    Offload,
    Quantization,
    Reduced,
    SampleRanks,
    Saving,
    Setup,
    Sharding,
    SoundDecoder,
    Speed,
)
from flowalign.types.policy import (
    ExportDtype,
    ExportTarget,
    Policy,
    PromptCache,
    PromptEncoder,
    TrainedNetwork,
    UserConditioning,
    VelocityField,
    with_denoiser,
    with_guidance,
    with_setup,
)
from flowalign.types.prompt_conditioning import (
    PromptConditioning,
    PromptGuidance,
    describe_conditioning,
    encode_requests,
    insert_words,
)
from flowalign.types.request import (
    ConditionedPrompt,
    MediaBatch,
    Reference,
    Request,
    plain_requests,
    prompts_of,
)
from flowalign.types.reward import (
    MAY_PASS,
    Column,
    EmbedsImages,
    JudgeCalls,
    Loadable,
    Need,
    RewardModel,
    RewardOutput,
    RewardSpec,
    score_usable,
)
from flowalign.types.reward_heads import (
    Backbone,
    Fit,
    Fittable,
    Head,
    HeadNetwork,
    LatentReward,
    NoisyBackbone,
    Refreshable,
)
from flowalign.types.trajectory import Completion, Cond, SharedRows, Trajectory
from flowalign.utils.media.media import Sound
from flowalign.utils.ranges import (
    LARGEST_INT,
    Component,
    Decay,
    DenoisingSteps,
    FiniteFloat,
    GroupSize,
    Guidance,
    GuidanceScale,
    ImportPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    Settings,
    UnitInterval,
    require_ranges,
)

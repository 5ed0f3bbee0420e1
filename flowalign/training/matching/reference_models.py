"""Reference models and averages of the policy that losses compare it with.

The reference is the initial model, an average, a periodic copy, or a teacher. Further averages of
the policy serve as old policies, which can generate samples, and as anchors.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from typing_extensions import override

from flowalign.training.checkpoint_paths import check_start
from flowalign.training.ema import EMA, Ramp
from flowalign.training.learner import Learner
from flowalign.training.reference import WeightOverride, check_guidance, find_scale, guide
from flowalign.types import Policy, VelocityField
from flowalign.types.ranges import Decay, GuidanceScale, PositiveInt, require_ranges

AverageName = Literal["reference", "old", "anchor", "behaviour"]
"""Name of an average of the policy's weights in `Learner.averages`. old: the old policy of a loss.
anchor: the average that a loss keeps the policy close to. behaviour: only used for sampling."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Average of the policy's weights on a schedule; it starts as a copy of the initial policy."""

    decay: Decay | Ramp = 0.0
    """Decay of the average: a number in [0, 1), or a ramp over the averagings. 0: a copy."""
    per: Literal["update", "step"] = "step"
    """Interval of the averaging. update: after every optimizer update. step: after every training
    step, so that the policy is compared with the weights that sampled the step's data."""

    def __post_init__(self) -> None:
        """Reject a decay outside [0, 1)."""
        require_ranges(self, type(self).__name__)

    def follow(self, learner: Learner, name: AverageName) -> VelocityField:
        """Average the parameters from now on, and return the average's velocity field.

        The learner also stores the field under `name`.
        """
        d = self.decay
        ramp = d if isinstance(d, Ramp) else Ramp(start=d, highest=d)
        learner.averages[name] = EMA(learner.parameters, ramp.at, per=self.per)
        learner.fields[name] = WeightOverride(learner.policy, learner.averages[name])
        return learner.fields[name]


class ReferenceModel(ABC):
    """Reference model of a run."""

    equals_policy: ClassVar[bool]
    """Whether policy and reference are equal before the first update."""

    @property
    def weight_copies(self) -> int:
        """Return the number of additional copies of the trained weights in memory."""
        return 1

    def count_evaluations(self, policy: Policy) -> int:  # noqa: ARG002
        """Return the number of network evaluations per row."""
        return 1

    def check(self, policy: Policy) -> None:  # noqa: B027
        """Raise ValueError if the policy does not support this reference."""

    @abstractmethod
    def field(self, learner: Learner) -> VelocityField:
        """Return the reference's velocity field; called once, before any update or resumption."""


@dataclass(frozen=True)
class FrozenBase(ReferenceModel):
    """Initial model: the policy with its adapter disabled, or a frozen copy without adapters."""

    equals_policy = True  # a fresh adapter is zero

    @property
    @override
    def weight_copies(self) -> int:
        """Return 0, because the copy for full fine-tuning is counted with the network."""
        return 0

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Return the reference that a learner starts with."""
        return learner.reference


@dataclass(frozen=True, kw_only=True)
class EMAReference(ReferenceModel, Average):
    """Exponential moving average of the policy.

    Source: Linear-DPO, arXiv:2605.21123, decays 0.95 to 0.995 after each update. DGPO's reference,
    arXiv:2510.08425, stays the initial model for 200 steps, which is a ramp with start 1 and flat
    200.
    """

    equals_policy = True  # the average starts as a copy
    decay: Decay | Ramp = 0.99
    """Decay of the average: a number in [0, 1), or a ramp over the averagings."""
    per: Literal["update", "step"] = "update"
    """Interval of the averaging. update: after every optimizer update. step: after every training
    step."""

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Average the parameters from now on."""
        return self.follow(learner, "reference")


@dataclass(frozen=True, kw_only=True)
class PeriodicCopy(ReferenceModel):
    """Copy of the policy that is renewed every `every` updates (iterative DPO)."""

    equals_policy = True  # the reference starts as a copy
    every: PositiveInt = 40
    """Number of updates between two copies."""

    def __post_init__(self) -> None:
        """Reject an `every` below 1."""
        require_ranges(self, "reference")

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Copy the parameters periodically, as an average with decay 0."""
        average = EMA(learner.parameters, 0.0, self.every)
        learner.averages["reference"] = average
        return WeightOverride(learner.policy, average)


@dataclass(frozen=True, kw_only=True)
class Teacher(ReferenceModel):
    """Trained weights of the same architecture, from a checkpoint."""

    equals_policy = False
    path: str
    """Folder of the checkpoint."""

    @override
    def check(self, policy: Policy) -> None:
        check_start(self.path, "recipe.teachers")

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Load the teacher's weights; raise ValueError for weights of another model."""
        # The checkpoint is loaded into the policy, so the policy's weights are saved first.
        own = EMA(learner.parameters, 0.0)
        learner.policy.load_weights(self.path)
        teacher = EMA(learner.parameters, 0.0)
        own.write()
        return WeightOverride(learner.policy, teacher)


@dataclass(frozen=True, kw_only=True)
class GuidedReference(ReferenceModel):
    """Another reference with classifier-free guidance, at two evaluations per row.

    Guidance away from the empty prompt is added here, even if the policy samples without guidance.
    Source: CRD, arXiv:2603.14128, with a KL to the base model with guidance 4.5.
    """

    equals_policy = False  # losses evaluate the policy without guidance
    guidance: GuidanceScale = 4.5
    """Guidance scale of the reference, above 1. model: the scale of the policy's run file; a model
    without guidance stays unguided."""
    inner: ReferenceModel = field(default_factory=FrozenBase)
    """Reference that is guided. Default: the initial model."""

    def __post_init__(self) -> None:
        """Reject a scale of at most 1, and nested guidance."""
        if self.guidance != "model" and not self.guidance > 1:
            raise ValueError(f"reference.guidance is {self.guidance}; it must be above 1")
        if isinstance(self.inner, GuidedReference):
            raise ValueError(
                "reference.inner is a GuidedReference; use its inner reference instead"
            )

    @property
    @override
    def weight_copies(self) -> int:
        return self.inner.weight_copies

    @override
    def count_evaluations(self, policy: Policy) -> int:
        return 1 + (find_scale(policy, self.guidance) > 1)

    @override
    def check(self, policy: Policy) -> None:
        check_guidance(policy, find_scale(policy, self.guidance), "recipe.reference.guidance")
        self.inner.check(policy)

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Return the guided inner reference; raise ValueError for a policy without guidance."""
        return guide(self.inner.field(learner), learner.policy, self.guidance)

"""Choose what the policy is compared with: a reference, and averages of itself.

The reference is the model before training, an average, a periodic copy, or a teacher. Averages of
the policy beside it are old policies, from which samples may be drawn, and anchors.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Literal

from typing_extensions import override

from flowalign.training.ema import EMA, Ramp
from flowalign.training.learner import Learner
from flowalign.training.reference import Guided, WeightOverride
from flowalign.types import VelocityField
from flowalign.types.ranges import Decay, PositiveInt, Range

AverageName = Literal["reference", "old", "anchor", "behaviour"]
"""Name of an average of the policy's weights in `Learner.averages`. old: what a loss calls the old
policy. anchor: what it holds the policy near. behaviour: only sampled from."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Averages the policy's weights on a schedule; decay 0 copies them.

    The average starts as the policy before training.
    """

    decay: Decay | Ramp = 0.0
    """Weight of the average in the next one: a number in [0, 1), or a ramp over the averagings."""
    per: Literal["update", "step"] = "step"
    """update: averages after every optimizer update. step: after every step of the loop, so that
    the policy is compared with the one that made the step's samples."""

    def __post_init__(self) -> None:
        """Reject a decay outside [0, 1)."""
        if not isinstance(self.decay, Ramp) and not 0 <= self.decay < 1:
            raise ValueError(f"{type(self).__name__}.decay is {self.decay}; it must be in [0, 1)")

    def follow(self, learner: Learner, name: AverageName) -> VelocityField:
        """Average the parameters from now on, under this name, and return the average's field.

        The learner has the field by this name, too.
        """
        d = self.decay
        ramp = d if isinstance(d, Ramp) else Ramp(start=d, highest=d)
        learner.averages[name] = EMA(learner.parameters, ramp.at, per=self.per)
        learner.fields[name] = WeightOverride(learner.policy, learner.averages[name])
        return learner.fields[name]


class ReferenceModel(ABC):
    """Chooses the reference of a run."""

    @property
    @abstractmethod
    def equals_policy(self) -> bool:
        """Return whether policy and reference are equal before the first update."""

    @property
    def weight_copies(self) -> int:
        """Return how many copies of the trained weights the reference keeps beside the policy's."""
        return 1

    @property
    def evaluations(self) -> int:
        """Return the network evaluations of one row."""
        return 1

    @abstractmethod
    def field(self, learner: Learner) -> VelocityField:
        """Return the reference's velocity field. Called once, before any update or resumption."""


@dataclass(frozen=True)
class FrozenBase(ReferenceModel):
    """Uses the model before training: the adapter switched off, or a frozen copy without one."""

    @property
    def equals_policy(self) -> bool:
        """Return True: a fresh adapter adds nothing."""
        return True

    @property
    @override
    def weight_copies(self) -> int:
        """Return 0: what full fine-tuning copies is counted with the network."""
        return 0

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Return the reference that a learner starts with."""
        return learner.reference


@dataclass(frozen=True, kw_only=True)
class EMAReference(ReferenceModel, Average):
    """Uses an exponential moving average of the policy.

    Source: Linear-DPO, arXiv:2605.21123, decays .95 to .995 once an update, after it. DGPO's
    reference, arXiv:2510.08425, stays the model before training for 200 steps: a ramp from start 1
    with flat 200.
    """

    decay: Decay | Ramp = 0.99
    """Decay of the average: a number in [0, 1), or a ramp over the averagings."""
    per: Literal["update", "step"] = "update"
    """update: averages after every optimizer update. step: after every step of the loop."""

    @property
    def equals_policy(self) -> bool:
        """Return True: the average starts as a copy."""
        return True

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Average the parameters from now on."""
        return self.follow(learner, "reference")


@dataclass(frozen=True, kw_only=True)
class PeriodicCopy(ReferenceModel):
    """Copies the policy every `every` updates: iterative DPO."""

    every: PositiveInt = 40
    """Number of updates between two copies."""

    def __post_init__(self) -> None:
        """Reject an `every` below 1."""
        if self.every < 1:
            raise ValueError(f"reference.every is {self.every}; it must be at least 1")

    @property
    def equals_policy(self) -> bool:
        """Return True: the reference starts as a copy."""
        return True

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Follow the parameters by an average with decay 0, which is a copy."""
        average = EMA(learner.parameters, 0.0, self.every)
        learner.averages["reference"] = average
        return WeightOverride(learner.policy, average)


@dataclass(frozen=True, kw_only=True)
class Teacher(ReferenceModel):
    """Uses trained weights of the same form, from the folder of a checkpoint."""

    path: str
    """Folder of the checkpoint."""

    @property
    def equals_policy(self) -> bool:
        """Return False: the weights are others."""
        return False

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Read the weights beside the policy's; raise ValueError for those of another model."""
        # The checkpoint is read into the policy itself, so its own weights wait in an average.
        own = EMA(learner.parameters, 0.0)
        learner.policy.load_weights(self.path)
        teacher = EMA(learner.parameters, 0.0)
        own.write()
        return WeightOverride(learner.policy, teacher)


@dataclass(frozen=True, kw_only=True)
class GuidedReference(ReferenceModel):
    """Uses another reference with classifier-free guidance, at two evaluations per row.

    Guidance away from the empty prompt is added here, whether the policy samples with it or not.
    Source: CRD, arXiv:2603.14128, whose KL is to the base model with guidance 4.5.
    """

    guidance: Annotated[float, Range(above=1, most=1000)] = 4.5
    """Guidance scale of the reference, above 1."""
    inner: ReferenceModel = field(default_factory=FrozenBase)
    """Weights of the reference."""

    def __post_init__(self) -> None:
        """Reject a scale that guides nothing, and guidance twice."""
        if not self.guidance > 1:
            raise ValueError(f"reference.guidance is {self.guidance}; it must be above 1")
        if isinstance(self.inner, GuidedReference):
            raise ValueError("reference.inner is a GuidedReference itself; name its inner instead")

    @property
    def equals_policy(self) -> bool:
        """Return False: losses see the policy without guidance."""
        return False

    @property
    @override
    def weight_copies(self) -> int:
        return self.inner.weight_copies

    @property
    @override
    def evaluations(self) -> int:
        return 2

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Guide the inner reference; raise ValueError for a policy that has no guidance."""
        return Guided(self.inner.field(learner), self.guidance)

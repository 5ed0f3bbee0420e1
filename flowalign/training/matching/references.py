"""Choose the reference: the model before training, an average, a periodic copy, or a teacher."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from flowalign.training.ema import EMA
from flowalign.training.learner import Learner
from flowalign.training.reference import WeightOverride
from flowalign.types import VelocityField
from flowalign.utils.ranges import Decay, PositiveInt


class Reference(ABC):
    """Chooses the reference of a run."""

    @property
    @abstractmethod
    def equals_policy(self) -> bool:
        """Return whether policy and reference are equal before the first update."""

    @abstractmethod
    def build(self, learner: Learner) -> None:
        """Set the learner's reference. Called once, before any update or resumption."""


@dataclass(frozen=True)
class FrozenBase(Reference):
    """Uses the model before training: the adapter switched off, or a frozen copy without one."""

    @property
    def equals_policy(self) -> bool:
        """Return True: a fresh adapter adds nothing."""
        return True

    def build(self, learner: Learner) -> None:
        """Keep the reference that a learner starts with."""


@dataclass(frozen=True, kw_only=True)
class EMAReference(Reference):
    """Uses an exponential moving average of the policy.

    Source: Linear-DPO, arXiv:2605.21123, decays .95 to .995 once an update, after it.
    """

    decay: Decay = 0.99
    """Decay of the average, in [0, 1), applied after each update."""

    def __post_init__(self) -> None:
        """Reject a decay outside [0, 1)."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"reference.decay is {self.decay}; it must be in [0, 1)")

    @property
    def equals_policy(self) -> bool:
        """Return True: the average starts as a copy."""
        return True

    def build(self, learner: Learner) -> None:
        """Average the parameters from now on."""
        _follow(learner, EMA(learner.parameters, self.decay, ramp=1))


@dataclass(frozen=True, kw_only=True)
class PeriodicCopy(Reference):
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

    def build(self, learner: Learner) -> None:
        """Follow the parameters by an average with decay 0, which is a copy."""
        _follow(learner, EMA(learner.parameters, 0.0, self.every))


@dataclass(frozen=True, kw_only=True)
class Teacher(Reference):
    """Uses trained weights of the same form, from the folder of a checkpoint."""

    path: str
    """Folder of the checkpoint."""

    @property
    def equals_policy(self) -> bool:
        """Return False: the weights are others."""
        return False

    def build(self, learner: Learner) -> None:
        """Read the weights beside the policy's; raise ValueError for those of another model."""
        learner.reference = self.field(learner)

    def field(self, learner: Learner) -> VelocityField:
        """Return the teacher's velocity field; raise ValueError for weights of another model."""
        own = EMA(learner.parameters, 0.0)
        learner.policy.load_weights(self.path)
        teacher = EMA(learner.parameters, 0.0)
        own.write()
        return WeightOverride(learner.policy, teacher)


def _follow(learner: Learner, average: EMA) -> None:
    learner.averages["reference"] = average
    learner.reference = WeightOverride(learner.policy, average)

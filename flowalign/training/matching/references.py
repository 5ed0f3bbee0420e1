"""What the policy is compared with: itself before training, an average, a snapshot, a teacher."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from flowalign.training.ema import EMA
from flowalign.training.learner import Learner
from flowalign.training.reference import WeightOverride
from flowalign.types import VelocityField


class Reference(ABC):
    """Chooses the reference of a run."""

    @property
    @abstractmethod
    def equals_policy(self) -> bool:
        """Whether policy and reference are equal before the first update."""

    @abstractmethod
    def build(self, learner: Learner) -> None:
        """Make it the learner's reference. Called once, before any update or resumption."""


@dataclass(frozen=True)
class FrozenBase(Reference):
    """The model before training: the adapter switched off, or a frozen copy without one."""

    @property
    def equals_policy(self) -> bool:
        """A fresh adapter adds nothing."""
        return True

    def build(self, learner: Learner) -> None:
        """Nothing is to be done: it is what a learner begins with."""


@dataclass(frozen=True, kw_only=True)
class EMAReference(Reference):
    """An exponential moving average of the policy.

    Source: Linear-DPO, arXiv:2605.21123, decays .95 to .995 once an update, after it.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        """Refuse what averages nothing."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"reference.decay is {self.decay}; it must be in [0, 1)")

    @property
    def equals_policy(self) -> bool:
        """It starts as a copy."""
        return True

    def build(self, learner: Learner) -> None:
        """Follow the parameters from now on."""
        _follow(learner, EMA(learner.parameters, self.decay, ramp=1))


@dataclass(frozen=True, kw_only=True)
class PeriodicCopy(Reference):
    """A copy of the policy, taken anew every so many updates: iterative DPO."""

    every: int = 40

    def __post_init__(self) -> None:
        """Refuse what is never taken."""
        if self.every < 1:
            raise ValueError(f"reference.every is {self.every}; it must be at least 1")

    @property
    def equals_policy(self) -> bool:
        """It starts as a copy."""
        return True

    def build(self, learner: Learner) -> None:
        """An average that forgets everything at once."""
        _follow(learner, EMA(learner.parameters, 0.0, self.every))


@dataclass(frozen=True, kw_only=True)
class Teacher(Reference):
    """Trained weights of the same form, from the folder of a checkpoint."""

    path: str

    @property
    def equals_policy(self) -> bool:
        """Other weights."""
        return False

    def build(self, learner: Learner) -> None:
        """Read them beside the policy's. ValueError for weights of another model."""
        learner.reference = self.field(learner)

    def field(self, learner: Learner) -> VelocityField:
        """The teacher. ValueError for weights of another model."""
        mine = EMA(learner.parameters, 0.0)
        learner.policy.load_weights(self.path)
        theirs = EMA(learner.parameters, 0.0)
        mine.write()
        return WeightOverride(learner.policy, theirs)


def _follow(learner: Learner, average: EMA) -> None:
    learner.averages["reference"] = average
    learner.reference = WeightOverride(learner.policy, average)

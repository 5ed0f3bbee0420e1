"""Step-level credit: its values, the method that assigns it, and the values that it asks for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.completion import Completion
from flowalign.types.trajectory import Trajectory


@dataclass(frozen=True)
class StepCredit:
    """What each transition earned, before any normalisation."""

    value: Float[Tensor, "B T R"]
    group: Int[Tensor, "B T"]
    """Transitions with equal ids are compared with each other."""
    mask: Bool[Tensor, "B T"]
    """True where a transition is trained."""
    normalised: bool = False
    """The values are advantages already; the recipe says so too, by advantage_scale given."""
    marked: Bool[Tensor, "B T"] | None = None
    """Transitions that the method singles out, such as turning points; for pictures only."""


class ValueFunction(ABC):
    """The one oracle of credit methods, and all that costs them anything."""

    @abstractmethod
    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Float[Tensor, "B K R"]:
        """Rewards of states ks after finishing each by ODE; values([T]) is the outcome.

        NaN where a reward failed. `how` None: as the recipe's `completion` says.
        """


class CreditEstimator(ABC):
    """Turns state values into per-transition credit. Implementations: `flowalign/credit/`."""

    @abstractmethod
    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Credit every transition of every sample."""

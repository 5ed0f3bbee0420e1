"""Define step-level credit, the methods that assign it, and the value function that they query."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.types.completion import Completion
from flowalign.types.latent_reward import LatentReward
from flowalign.types.ranges import require_ranges
from flowalign.types.trajectory import Trajectory


@dataclass(frozen=True)
class StepCredit:
    """Credit of each transition, before normalisation."""

    value: Float[Tensor, "B T R"]
    """Credit in reward units, or advantages if `normalised`; NaN where a reward failed."""
    group: Int[Tensor, "B T"]
    """Group ids; transitions with equal ids are compared with each other."""
    mask: Bool[Tensor, "B T"]
    """True where a transition is trained."""
    normalised: bool = False
    """Whether `value` already holds advantages; the recipe then needs `advantages.scale: given`."""
    process: Float[Tensor, "B T R"] | None = None
    """Process reward of each transition, compared and clipped separately from `value`; or None."""
    marked: Bool[Tensor, "B T"] | None = None
    """True for transitions to highlight in charts, such as turning points; or None."""


class PastOutcomes(NamedTuple):
    """Outcomes of a rollout's prompts in earlier steps of the loop."""

    value: Float[Tensor, "m R"]
    """Rewards; NaN where a reward failed."""
    prompt: Int[Tensor, "m"]
    """Index of each outcome's prompt among the prompts of the rollout."""


class ValueFunction(ABC):
    """Values of intermediate states for credit methods; their only source of compute cost."""

    @abstractmethod
    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Float[Tensor, "B K R"]:
        """Return the rewards of states `ks`, each completed by ODE; `values([T])` is the outcome.

        A failed reward is NaN. With `how` None, the recipe's `completion` applies.
        """

    @abstractmethod
    def past(self, num_steps: int) -> PastOutcomes | None:
        """Return the outcomes of the rollout's prompts in the last `num_steps` steps of the loop.

        Returns None if no history is kept, for example outside a loop.
        """

    @abstractmethod
    def predicted(self, ks: Sequence[int]) -> Float[Tensor, "B K R"]:
        """Return the outcomes that the recipe's critic predicts from states `ks`, at no extra cost.

        The critic was trained on earlier steps of the loop only. It predicts differences within a
        prompt, so the mean over a prompt's samples is 0. It makes no prediction for state T.
        """

    @abstractmethod
    def scored(self, ks: Sequence[int], reward: LatentReward) -> Float[Tensor, "B K R"]:
        """Return the scores of states `ks` by a reward of noisy latents, without completing them.

        Columns are the run's reward dimensions; NaN for a dimension that `reward` does not score.
        """


class CreditEstimator(ABC):
    """Credit method: turns state values into credit per transition. See `flowalign/credit/`."""

    def __post_init__(self) -> None:
        """Reject settings outside the ranges of their types, if the method is a dataclass."""
        require_ranges(self, "credit")

    @property
    def selects(self) -> bool:
        """Return whether some transitions may get no credit, so that planned costs are bounds."""
        return False

    @abstractmethod
    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Credit every transition of every sample."""

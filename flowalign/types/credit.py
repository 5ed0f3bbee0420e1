"""Define step-level credit, the methods that assign it, and the value function that they query."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.types.completion import Completion
from flowalign.types.latent_reward import LatentReward
from flowalign.types.trajectory import Trajectory


@dataclass(frozen=True)
class StepCredit:
    """Holds the credit of each transition, before any normalisation."""

    value: Float[Tensor, "B T R"]
    """Credit in units of the reward, or as advantages where `normalised`; NaN where a reward
    failed."""
    group: Int[Tensor, "B T"]
    """Ids of the groups; transitions with equal ids are compared with each other."""
    mask: Bool[Tensor, "B T"]
    """True where a transition is trained."""
    normalised: bool = False
    """True where the values are advantages already; the recipe then needs
    advantages.scale given."""
    process: Float[Tensor, "B T R"] | None = None
    """Process reward of each transition, which is compared and clipped apart from `value`."""
    marked: Bool[Tensor, "B T"] | None = None
    """True where the method singles a transition out, such as a turning point; only charts use
    it."""


class PastOutcomes(NamedTuple):
    """Holds outcomes that the prompts of a rollout had in earlier steps of the loop."""

    value: Float[Tensor, "m R"]
    """Rewards; NaN where one failed."""
    prompt: Int[Tensor, "m"]
    """Position of each one's prompt among those of the rollout."""


class ValueFunction(ABC):
    """Values intermediate states for credit methods, and is their only source of cost."""

    @abstractmethod
    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Float[Tensor, "B K R"]:
        """Return the rewards of states ks, each completed by ODE; values([T]) is the outcome.

        A reward that failed is NaN. `how` None: as the recipe's `completion` says.
        """

    @abstractmethod
    def past(self, num_steps: int) -> PastOutcomes | None:
        """Return the outcomes that these prompts had in the `num_steps` steps of the loop before.

        None where nothing remembers them, as outside a loop.
        """

    @abstractmethod
    def predicted(self, ks: Sequence[int]) -> Float[Tensor, "B K R"]:
        """Return the outcomes that the recipe's critic predicts from states ks, for nothing.

        The critic has seen earlier steps of the loop only, and predicts differences within prompts:
        the mean of a prompt's samples is 0. The last state has an outcome and no prediction.
        """

    @abstractmethod
    def scored(self, ks: Sequence[int], reward: LatentReward) -> Float[Tensor, "B K R"]:
        """Return what a reward of noisy latents says of states ks, which nothing completes.

        Columns are the run's reward dimensions; NaN where the latent reward has none of that name.
        """


class CreditEstimator(ABC):
    """Turns state values into per-transition credit. Implementations: `flowalign/credit/`."""

    @abstractmethod
    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Credit every transition of every sample."""

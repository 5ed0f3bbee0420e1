"""Define step-level credit, the values of states, and paths of reward gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.transition import Kernel
from flowalign.types.reward_heads import LatentReward
from flowalign.types.trajectory import Completion, Trajectory
from flowalign.utils.ranges import require_ranges


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


MatchedLosses = Callable[[Float[Tensor, "n *latent"]], Iterator[Float[Tensor, "n"]]]
"""Function of the gradient of each sample's loss in the clean latents. It yields parts of the loss
of each sample; the caller runs the backward pass of a part before it takes the next one."""


@dataclass(frozen=True)
class SampleView:
    """Clean latents that a reward scores, with a gradient to the policy's velocities."""

    clean: Float[Tensor, "n *latent"]
    """Latents to decode, with a gradient to the policy."""
    weight: Float[Tensor, "n"] | None = None
    """Weight of each sample in the loss; None: 1."""
    inverted: bool = False
    """Whether the latents were reached by adding noise; a relative reward then swaps its
    prompts."""
    place: float = 0.0
    """Position of the noise level in [0, 1], 1 for the most noise, for rewards that depend on
    it."""
    matched: MatchedLosses | None = None
    """Losses to backpropagate one by one instead of the gradient at `clean`, if it is not None."""


class Replay(ABC):
    """Cached rollout that is evaluated again, with a gradient to the policy.

    Step k leads from state k to state k + 1. Rows are the samples of one micro-batch.
    """

    sigmas: Float[Tensor, "S"]
    """Schedule of the rollout."""
    kernel: Kernel
    """Transition family of the rollout."""

    @property
    def num_steps(self) -> int:
        """Return T, the number of steps."""
        return len(self.sigmas) - 1

    @abstractmethod
    def state(self, k: int) -> Float[Tensor, "n *latent"]:
        """Return state k of the rollout, without gradient; state T is the sample.

        Raises:
            ValueError: There was no rollout and k is not the last state.
        """

    @abstractmethod
    def velocity(
        self, k: int, x: Float[Tensor, "n *latent"] | None = None
    ) -> Float[Tensor, "n *latent"]:
        """Return the policy's velocity at state k, with a gradient to its parameters.

        `x` is state k with a gradient, which flows through the network; None: without gradient.
        """

    @abstractmethod
    def velocity_at(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, ""]
    ) -> Float[Tensor, "n *latent"]:
        """Return the policy's velocity at any state `x`, with a gradient to its parameters."""

    @abstractmethod
    def eta(self, k: int) -> Float[Tensor, "n"]:
        """Return the noise level of step k; 0 for a deterministic step."""

    @abstractmethod
    def pull_back(
        self, k: int, vector: Float[Tensor, "n *latent"]
    ) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n *latent"]]:
        """Return the initial model's velocity v at state k, and (dv / dx)^T vector.

        Neither has a gradient. It costs one evaluation with a backward pass to the state.
        """

    @abstractmethod
    def initial_noise(self) -> Float[Tensor, "n *latent"]:
        """Return the standard normal noise that the rollout started from.

        Without a rollout, or if it did not start at pure noise, each sample gets its own noise.
        """

    @abstractmethod
    def noise(self, i: int) -> Float[Tensor, "n *latent"]:
        """Return standard normal noise number `i`, reproducible and different for each sample."""

    @abstractmethod
    def schedule(self, num_steps: int) -> Float[Tensor, "S"]:
        """Return the sigmas of the policy's sampler with `num_steps` steps."""

    def cached_velocity(self, k: int) -> Float[Tensor, "n *latent"]:
        """Return the velocity that the rollout used in step k, without gradient."""
        return (self.state(k + 1) - self.state(k)) / (self.sigmas[k + 1] - self.sigmas[k])


class GradientPath(ABC):
    """Choice of the rollout steps that a reward's gradient reaches, and of the path to them.

    Implementations: `flowalign.gradient_paths`.
    """

    matches: ClassVar[bool] = False
    """Whether views have `matched` losses, which need stochastic rollouts."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, f"recipe.gradient_path {type(self).__name__}")

    @abstractmethod
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield clean latents with a gradient, one row per sample, once per scoring of the samples.

        The caller runs the backward pass before it takes the next view. Steps are drawn from
        `generator`, so all micro-batches of an update use the same steps.

        Raises:
            ValueError: The rollout has too few steps.
        """

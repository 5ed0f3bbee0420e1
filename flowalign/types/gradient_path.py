"""Define how the gradient of a reward reaches a policy: cached rollouts, gradient paths."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class SampleView:
    """Holds clean latents that a reward scores, connected to velocities of the policy."""

    clean: Float[Tensor, "n *latent"]
    """Latents to decode; their gradient leads to the policy."""
    weight: Float[Tensor, "n"] | None = None
    """Weight of each sample in the loss; None: 1."""
    inverted: bool = False
    """Whether they were reached by adding noise, so that a relative reward swaps its prompts."""
    place: float = 0.0
    """Place of the noise level in [0, 1], growing with the noise, for rewards that depend on
    it."""


class Replay(ABC):
    """Evaluates steps of a cached rollout again, with a gradient to the policy.

    Step k leads from state k to state k + 1. Rows are the samples of one micro-batch.
    """

    sigmas: Float[Tensor, "S"]
    """Schedule of the rollout."""

    @property
    def num_steps(self) -> int:
        """Return T, the number of steps."""
        return len(self.sigmas) - 1

    @abstractmethod
    def state(self, k: int) -> Float[Tensor, "n *latent"]:
        """Return state k of the rollout, without gradient; state T is the sample.

        Raises:
            ValueError: There was no rollout, and k is not the last state.
        """

    @abstractmethod
    def velocity(
        self, k: int, x: Float[Tensor, "n *latent"] | None = None
    ) -> Float[Tensor, "n *latent"]:
        """Return the policy's velocity at state k, with a gradient to its parameters.

        `x` is that state with a gradient of its own, which then flows on; None: it has none.
        """

    @abstractmethod
    def velocity_at(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, ""]
    ) -> Float[Tensor, "n *latent"]:
        """Return the policy's velocity anywhere, with a gradient to its parameters."""

    @abstractmethod
    def initial_noise(self) -> Float[Tensor, "n *latent"]:
        """Return the standard normal noise that the rollout started from.

        Samples that no rollout made, or one that did not start at pure noise, have noise of their
        own.
        """

    @abstractmethod
    def noise(self, i: int) -> Float[Tensor, "n *latent"]:
        """Return standard normal noise, the same for the same i, different for each sample."""

    @abstractmethod
    def schedule(self, num_steps: int) -> Float[Tensor, "S"]:
        """Return the sigmas of the policy's sampler with another number of steps."""

    def cached_velocity(self, k: int) -> Float[Tensor, "n *latent"]:
        """Return the velocity of step k as the rollout made it, without gradient."""
        return (self.state(k + 1) - self.state(k)) / (self.sigmas[k + 1] - self.sigmas[k])


class GradientPath(ABC):
    """Says which steps of a rollout the gradient of a reward reaches, and on which path.

    Implementations: `flowalign.gradient_paths`.
    """

    @abstractmethod
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield connected latents, one row per sample, as often as each sample is scored.

        The caller computes gradients before it asks for the next. Steps are drawn from
        `generator`, so that all micro-batches of an update draw the same.

        Raises:
            ValueError: The rollout has too few steps.
        """

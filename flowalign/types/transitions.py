"""Define minibatches of rollout transitions and the interface of losses on them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.chunk import Chunk
from flowalign.functional.transition import Gaussian, Kernel, transition
from flowalign.types.loss import Loss
from flowalign.types.policy import VelocityField
from flowalign.types.trajectory import Cond


@dataclass(frozen=True)
class Minibatch:
    """Transition k of n samples, with everything a loss may read."""

    k: int
    """Index of the transition."""
    x: Float[Tensor, "n *latent"]
    """State x_k."""
    x_next: Float[Tensor, "n *latent"]
    """State x_{k+1} that the old policy drew."""
    logp_old: Float[Tensor, "n"]
    """log pi_old(x_{k+1} | x_k), averaged over latent elements."""
    advantage: Float[Tensor, "n"]
    """Advantage of each transition."""
    weight: Float[Tensor, "n"]
    """Weight of each transition in the policy term; 0 excludes it."""
    sigmas: Float[Tensor, "S"]
    """Schedule of the trajectories."""
    eta: Float[Tensor, "n"]
    """Noise level of each transition."""
    kernel: Kernel
    """Transition family that drew the states."""
    cond: Cond
    """Text conditioning, one row per sample."""
    mean_old: Float[Tensor, "n *latent"] | None = None
    """Mean of the transition under the old policy, for losses that declare `needs_mean_old`."""
    chunk: Chunk | None = None
    """Log-ratios and size of each transition's chunk, for losses that declare chunks."""
    source: Int[Tensor, "n"] | None = None
    """Id of the start state of each transition, on the CPU; None if all states differ."""
    process: Float[Tensor, "n"] | None = None
    """Advantage of each transition's process reward, clipped separately; None if there is none."""
    has_kl: Bool[Tensor, "n"] | None = None
    """Mask of the transitions with a KL to the reference; None: all."""
    places: Float[Tensor, "n 1 *grid"] | None = None
    """Advantage of each transition at each latent position; None: `advantage` at all positions."""
    after: tuple["Minibatch", ...] = ()
    """Transitions that follow in the same span, for losses that declare a span; else empty."""

    @property
    def span(self) -> tuple["Minibatch", ...]:
        """Return the transitions of the span in order, starting with this one."""
        return (self, *self.after)

    @property
    def required_mean_old(self) -> Float[Tensor, "n *latent"]:
        """Return `mean_old`, which the loop provides to losses that declare `needs_mean_old`."""
        assert self.mean_old is not None, "the loss uses mean_old without declaring needs_mean_old"
        return self.mean_old

    @property
    def dt(self) -> Float[Tensor, ""]:
        """Return the length of the step, sigma_k - sigma_{k+1} > 0."""
        return self.sigmas[self.k] - self.sigmas[self.k + 1]

    def transition(self, field: "VelocityField") -> Gaussian:
        """Return pi(. | x_k) under a velocity field, evaluated once per distinct state."""
        velocity = self.velocity(field)
        return transition(self.kernel, self.x.float(), velocity, self.sigmas, self.k, self.eta)

    def velocity(self, field: "VelocityField") -> Float[Tensor, "n *latent"]:
        """Return the velocity at x_k, evaluated once per distinct state."""
        x, sigma = self.x.float(), self.sigmas[self.k]
        if self.source is None:
            return field.velocity(x, sigma, self.cond)
        first, row = first_of_each(self.source)
        first, row = first.to(x.device), row.to(x.device)
        cond = {name: value[first] for name, value in self.cond.items()}
        return field.velocity(x[first], sigma, cond)[row]


def first_of_each(
    source: Int[Tensor, "n"],
) -> tuple[Int[Tensor, "m"], Int[Tensor, "n"]]:
    """Return the first index of each distinct value, and each entry's position among them."""
    values, row = source.unique(return_inverse=True)
    first = torch.full((len(values),), len(source)).scatter_reduce(
        0, row, torch.arange(len(source)), "amin"
    )
    return first, row


class PolicyLoss(ABC):
    """Loss on minibatches of transitions. Implementations: `flowalign/losses/`."""

    pairs: ClassVar[bool] = False
    """Whether a minibatch holds pairs: all winners, then their losers."""

    @property
    def needs_reference(self) -> bool:
        """Return whether `loss` evaluates the reference (default: False).

        This costs one more network evaluation per transition.
        """
        return False

    @property
    def needs_mean_old(self) -> bool:
        """Return whether rollouts must store the mean of each trained transition."""
        return False

    @property
    def uses_places(self) -> bool:
        """Return whether the loss uses advantages of latent positions (default: False)."""
        return False

    @property
    def chunks(self) -> Sequence[int] | Literal["latent_change"] | None:
        """Return the lengths of the chunks of steps that share one ratio; see `GRPO`.

        Chunks are counted from the first step. None: one ratio per step.
        """
        return None

    @property
    def span(self) -> int | None:
        """Return the largest number of consecutive steps per minibatch; None: one step."""
        return None

    @property
    @abstractmethod
    def clip(self) -> float:
        """Return the largest change of the ratio that is not clipped.

        The replay check compares the drift with it.
        """

    @abstractmethod
    def loss(self, policy: VelocityField, reference: VelocityField, batch: Minibatch) -> Loss:
        """Return the mean loss over the minibatch and detached scalars for the log."""

"""Define minibatches of rollout transitions, and the interface of losses that learn from them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.chunk import Chunk
from flowalign.functional.transition import Gaussian, Kernel, transition
from flowalign.types.loss import Loss
from flowalign.types.policy import VelocityField
from flowalign.types.trajectory import Cond


class BestTransition(NamedTuple):
    """Holds the transition that the best sample of each sample's prompt made at the same step."""

    x: Float[Tensor, "n *latent"]
    """State x_k."""
    x_next: Float[Tensor, "n *latent"]
    """State x_{k+1}."""
    eta: Float[Tensor, "n"]
    """Noise level."""


@dataclass(frozen=True)
class Minibatch:
    """Holds one transition k of n samples: everything a loss may read."""

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
    """Weight of each transition in the policy term; 0 takes it out."""
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
    """Equal numbers for transitions that leave one state, on the CPU; None if all states differ."""
    process: Float[Tensor, "n"] | None = None
    """Advantage of each transition's process reward, clipped apart; None if credit has none."""
    best: BestTransition | None = None
    """Transitions of the best samples, for losses that declare `needs_best`."""
    after: tuple["Minibatch", ...] = ()
    """The transitions that follow in the span of this one, for losses that declare a span."""

    @property
    def span(self) -> tuple["Minibatch", ...]:
        """Return the transitions of the span in order, this one first."""
        return (self, *self.after)

    @property
    def required_mean_old(self) -> Float[Tensor, "n *latent"]:
        """Return mean_old, which the loop keeps for losses that declare `needs_mean_old`."""
        assert self.mean_old is not None, "the loss uses mean_old without declaring needs_mean_old"
        return self.mean_old

    @property
    def required_best(self) -> BestTransition:
        """Return best, which the loop finds for losses that declare `needs_best`."""
        assert self.best is not None, "the loss uses best without declaring needs_best"
        return self.best

    @property
    def dt(self) -> Float[Tensor, ""]:
        """Return the length of the step, sigma_k - sigma_{k+1} > 0."""
        return self.sigmas[self.k] - self.sigmas[self.k + 1]

    def transition(self, field: "VelocityField") -> Gaussian:
        """Return pi(. | x_k) under the given velocity field, evaluated once for each state."""
        velocity = self.velocity(field)
        return transition(self.kernel, self.x.float(), velocity, self.sigmas, self.k, self.eta)

    def velocity(self, field: "VelocityField") -> Float[Tensor, "n *latent"]:
        """Return the velocity at x_k, evaluated once for each state."""
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
    """Return where each number occurs first, and the position of every entry's number in that."""
    values, row = source.unique(return_inverse=True)
    first = torch.full((len(values),), len(source)).scatter_reduce(
        0, row, torch.arange(len(source)), "amin"
    )
    return first, row


class PolicyLoss(ABC):
    """Turns one minibatch of transitions into a loss. Implementations: `flowalign/losses/`."""

    @property
    def needs_reference(self) -> bool:
        """Return whether `loss` evaluates the reference; unless a loss says so, it does not.

        That is one more network evaluation per transition.
        """
        return False

    @property
    def needs_mean_old(self) -> bool:
        """Return whether rollouts must keep the mean of each trained transition."""
        return False

    @property
    def needs_best(self) -> bool:
        """Return whether a minibatch must hold the transitions of the best sample of a prompt."""
        return False

    @property
    def pairs(self) -> bool:
        """Return whether a minibatch holds pairs: winners, then as many losers."""
        return False

    @property
    def chunks(self) -> Sequence[int] | Literal["latent_change"] | None:
        """Return the lengths of runs of steps whose ratios are taken together; see `GRPO`.

        Runs count from the first step on.
        """
        return None

    @property
    def span(self) -> int | None:
        """Return the most consecutive steps that a minibatch holds together; None: single ones."""
        return None

    @property
    @abstractmethod
    def clip(self) -> float:
        """Return the largest change of the ratio that passes.

        The replay check compares the drift with it.
        """

    @abstractmethod
    def loss(self, policy: VelocityField, reference: VelocityField, batch: Minibatch) -> Loss:
        """Return the mean loss over the minibatch, and detached scalars for the log."""

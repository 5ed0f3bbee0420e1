"""Transitions of rollouts, and the interface of the losses that learn from them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.chunk import Chunk
from flowalign.functional.transition import Gaussian, Kernel, transition
from flowalign.types.policy import VelocityField
from flowalign.types.trajectory import Cond


@dataclass(frozen=True)
class Minibatch:
    """One transition k of n samples: everything a loss may look at."""

    k: int
    x: Float[Tensor, "n *latent"]
    x_next: Float[Tensor, "n *latent"]
    logp_old: Float[Tensor, "n"]
    advantage: Float[Tensor, "n"]
    weight: Float[Tensor, "n"]
    """Multiplies the policy term of each transition; 0 takes it out."""
    sigmas: Float[Tensor, "S"]
    eta: Float[Tensor, "n"]
    kernel: Kernel
    cond: Cond
    mean_old: Float[Tensor, "n *latent"] | None = None
    """Mean of the transition under the policy that sampled it, for losses that declare the need."""
    chunk: Chunk | None = None
    """The rest of each transition's chunk, for losses that declare chunks."""

    @property
    def required_mean_old(self) -> Float[Tensor, "n *latent"]:
        """mean_old, which the loop keeps for losses that declare `needs_mean_old`."""
        assert self.mean_old is not None, "the loss uses mean_old without declaring needs_mean_old"
        return self.mean_old

    @property
    def dt(self) -> Float[Tensor, ""]:
        """Length of the step, sigma_k - sigma_{k+1} > 0."""
        return self.sigmas[self.k] - self.sigmas[self.k + 1]

    def transition(self, field: "VelocityField") -> Gaussian:
        """pi(. | x_k) under the given velocity field."""
        velocity = field.velocity(self.x.float(), self.sigmas[self.k], self.cond)
        return transition(self.kernel, self.x.float(), velocity, self.sigmas, self.k, self.eta)


class PolicyLoss(ABC):
    """Turns one minibatch of transitions into a loss. Implementations: `flowalign/losses/`."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether `loss` evaluates the reference: one more network evaluation per transition."""

    @property
    @abstractmethod
    def needs_mean_old(self) -> bool:
        """Whether rollouts must keep the mean of each trained transition."""

    @property
    @abstractmethod
    def pairs(self) -> bool:
        """Whether a minibatch holds pairs: winners, then as many losers."""

    @property
    @abstractmethod
    def chunks(self) -> Sequence[int] | Literal["latent_change"] | None:
        """Numbers of steps whose ratios are taken together, from the first on; see `GRPO`."""

    @property
    @abstractmethod
    def clip(self) -> float:
        """Largest change of the ratio that passes; the replay check compares drift with it."""

    @abstractmethod
    def loss(
        self, policy: VelocityField, reference: VelocityField, batch: Minibatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the minibatch, and detached scalars for the log."""

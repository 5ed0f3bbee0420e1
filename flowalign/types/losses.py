"""Define the fields that losses evaluate, and the interfaces of losses on a batch.

A policy loss reads transitions of rollouts. A matching loss reads residuals of predictions; for
pairs, the winners come first, then the losers in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import FlowSDE, Gaussian, Kernel, transition
from flowalign.types.batch import Batch
from flowalign.types.policy import VelocityField
from flowalign.utils.ranges import require_ranges

Loss: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""Mean loss of a minibatch, and detached scalars for the log."""


@dataclass(frozen=True)
class Fields:
    """Velocity fields that a loss evaluates, and the transitions that they define."""

    policy: VelocityField
    """Trained policy."""
    reference: VelocityField
    """Reference of the KL, without gradient."""
    kernel: Kernel
    """Transition family that drew the states."""
    sigmas: Float[Tensor, "S"]
    """Schedule of the trajectories."""

    def dt(self, batch: Batch) -> Float[Tensor, ""]:
        """Return the length of the step, sigma_k - sigma_{k+1} > 0."""
        k = step_of(batch)
        return self.sigmas[k] - self.sigmas[k + 1]

    def transition(self, field: VelocityField, batch: Batch) -> Gaussian:
        """Return pi(. | x_k) under a velocity field, evaluated once per distinct state."""
        k, velocity = step_of(batch), self.velocity(field, batch)
        return transition(self.kernel, batch["x"].float(), velocity, self.sigmas, k, batch["eta"])

    def velocity(self, field: VelocityField, batch: Batch) -> Float[Tensor, "n *latent"]:
        """Return the velocity at x_k, evaluated once per distinct state, or kept by the rollout."""
        if "velocity" in batch and field is self.policy:
            return batch["velocity"]
        x, sigma, cond = batch["x"].float(), self.sigmas[step_of(batch)], batch["cond"]
        if "state" not in batch:
            return field.velocity(x, sigma, cond)
        first, row = (index.to(x.device) for index in first_of_each(batch["state"]))
        cond = {name: value[first] for name, value in cond.items()}
        return field.velocity(x[first], sigma, cond)[row]


def step_of(batch: Batch) -> int:
    """Return the denoising step of the transitions, which is the same in all rows."""
    return int(batch["k"][0])


def steps_of(batch: Batch) -> list[Batch]:
    """Return the rows of each denoising step, in order; a span has several steps."""
    k = batch["k"]
    first = k[0].item()
    if (k == first).all():
        return [batch]
    return [batch.take((k == step).nonzero()[:, 0]) for step in k.unique().tolist()]


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
    """Loss on batches of transitions. Implementations: `flowalign/losses/`."""

    pairs: ClassVar[bool] = False
    """Whether a minibatch holds pairs: all winners, then their losers."""

    @property
    def needs(self) -> Set[str]:
        """Return what the loss reads in addition to the columns of every batch (default: nothing).

        mean_old: rollouts store the mean of each trained transition. reference: the loss evaluates
        the reference, at one more network evaluation per transition.
        """
        return frozenset()

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
    def loss(self, fields: Fields, batch: Batch) -> Loss:
        """Return the mean loss over the rows, and detached scalars for the log."""


FIELDS = "reference", "old", "anchor"
"""Columns with residuals of other weights than the policy's. They are filled if a loss needs them,
at one more network evaluation per row."""
STEPS = frozenset({"travelled", "slope", "std", "dt", "logp_old"})
"""Columns of the stochastic steps that the policy took from visited states."""


@dataclass(frozen=True)
class LossContext:
    """Inputs of a loss that are equal for all rows of its batch."""

    typical_margin: float = 0.0
    """Running mean of |(l_w - r_w) - (l_l - r_l)|; 0 before the first update."""
    gather: Callable[[Tensor], Tensor] = torch.Tensor.detach
    """Function that concatenates a tensor over processes, without gradient."""
    kernel: Kernel = field(default_factory=FlowSDE)
    """Transition family of the steps from visited states."""
    modality_sizes: Mapping[str, int] = field(default_factory=dict)
    """Number of elements of each part of a flat latent, in order; empty: latents have no parts."""


ALONE = LossContext()
"""Context of a single process before its first update."""


class MatchingLoss(ABC):
    """Loss on the residuals of a batch. Implementations: `flowalign/losses/`.

    Every batch has the columns `latents`, `weight`, `sigma`, `target` and `policy`.
    """

    paired: ClassVar[bool] = True
    """Whether rows must be pairs; if False, the rows of pairs are used as samples."""
    velocity: ClassVar[bool] = False
    """Whether errors are only meaningful in the space `velocity`."""
    shared_noise: ClassVar[bool] = False
    """Whether the rows of a group must also have the same noise."""
    uses_places: ClassVar[bool] = False
    """Whether the loss uses the column `places` if there is one."""
    reads: ClassVar[Set[str]] = frozenset({"reference"})
    """Value of `needs`, if it does not depend on the settings."""

    def __post_init__(self) -> None:
        """Reject settings outside the ranges of their types, if the loss is a dataclass."""
        require_ranges(self, type(self).__name__)

    @property
    def needs(self) -> Set[str]:
        """Return the columns that the loss reads in addition to those of every batch.

        A loss that needs `group` gets all rows of a group in one micro-batch. It gathers once per
        micro-batch, so a group may span processes with equal numbers of micro-batches. Samples
        without a needed label are dropped.
        """
        return self.reads

    @property
    def whole_batch(self) -> bool:
        """Return whether a micro-batch must be the whole batch of a process (default: False)."""
        return False

    @property
    def at_start(self) -> float | None:
        """Return the loss while policy and reference are equal and all weights are 1.

        None, the default: it depends on the data.
        """
        return None

    @abstractmethod
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over pairs, or over rows if unpaired, and scalars for the log."""

    def mean(self, batch: Batch, each: Float[Tensor, "m"], stats: Mapping[str, Tensor]) -> Loss:
        """Return the weighted mean of the losses of rows, or of pairs, and the log with it."""
        loss = (batch["weight"][: len(each)] * each).mean()
        return loss, {**stats, "policy_loss": loss.detach()}

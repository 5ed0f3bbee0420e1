"""Preference data and the losses that learn from it: values passed between stages, interfaces.

Axes beside those of `types`: n rows of latents; m pairs, whose winners are rows 0 to m - 1 and
whose losers are rows m to 2m - 1, in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Label = Literal["labels", "segments", "masks"]
"""What data may know beside media and prompts, and some losses cannot do without."""


@dataclass(frozen=True)
class Examples:
    """One minibatch of latents to match: everything a loss may look at beside the errors."""

    latents: Float[Tensor, "n *latent"]
    """Clean, of pairs the winners and then the losers."""
    cond: Mapping[str, Tensor]
    """One row per row of latents."""
    paired: bool
    weight: Float[Tensor, "n"]
    """Of the loss of each row; both rows of a pair have the pair's."""
    desirable: Bool[Tensor, "n"]
    """Labels, True where there is none; of pairs, True for winners."""
    scores: Mapping[str, Float[Tensor, "n"]] = field(default_factory=dict)
    """By dimension; NaN where unknown."""
    segments: Float[Tensor, "m F"] | None = None
    """Which row of a pair is better in each latent frame: 1 the winner, -1 the loser, 0 neither."""
    mask: Float[Tensor, "n *mask"] | None = None
    """Where the rows of a pair differ, at least 0; broadcast to the latent."""
    mask_strength: Float[Tensor, "n"] | None = None
    """Multiplies what is within the mask; None: 1."""
    weight_map: Float[Tensor, "n *map"] | None = None
    """Importance of every place, mean 1 per row; it has been applied to the errors."""
    expert_cond: Mapping[str, Tensor] | None = None
    """Conditioning of the expert whose velocity each row is matched to; None: noise - latents."""
    users: Sequence[str] = ()
    """Who judged each row, for policies that answer to users; empty where nobody is known."""


@dataclass(frozen=True)
class Residuals:
    """What the networks miss of the target, prediction - target, in the recipe's space."""

    policy: Float[Tensor, "n *latent"]
    """With gradient."""
    reference: Float[Tensor, "n *latent"] | None = None
    """Without gradient, same noise and time; None where the loss needs no reference."""

    @property
    def required_reference(self) -> Float[Tensor, "n *latent"]:
        """The reference's residual, which the loop computes for losses that declare the need."""
        assert self.reference is not None, "the loss uses a reference without declaring it"
        return self.reference


@dataclass(frozen=True)
class LossContext:
    """What a loss may know beside its minibatch."""

    typical_margin: float = 0.0
    """Running mean of |(l_w - r_w) - (l_l - r_l)|; 0 before the first update."""
    gather: Callable[[Tensor], Tensor] = torch.Tensor.detach
    """Concatenates a tensor over processes, without gradient."""


ALONE = LossContext()
"""The context of a single process before its first update."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a loss asks of the loop and of the data."""

    reference: bool = True
    """The reference is evaluated: one more network evaluation per row."""
    paired: bool = True
    """Rows must be pairs; other losses take the rows of pairs as samples."""
    whole_batch: bool = False
    """A minibatch must be all of a process's batch, because rows are compared."""
    requires: Set[Label] = frozenset()
    """What it cannot do without: other data are refused, samples without a label left out."""
    at_start: float | None = None
    """The loss while policy and reference are equal and weights are 1; None: any value."""


class MatchingLoss(ABC):
    """Turns matching errors of a minibatch into a loss. See `flowalign/losses/`."""

    @property
    @abstractmethod
    def requirements(self) -> Requirements:
        """What it asks for."""

    @abstractmethod
    def loss(
        self, residuals: Residuals, batch: Examples, context: LossContext = ALONE
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over pairs (of unpaired losses, rows), and detached scalars for the log."""

"""Define the interface of the losses on matching residuals.

A batch of pairs has the winners first, then their losers in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flowalign.functional.transition import FlowSDE, Kernel
from flowalign.types.batch import Batch
from flowalign.types.loss import Loss
from flowalign.types.ranges import require_ranges

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

    def __post_init__(self) -> None:
        """Reject settings outside the ranges of their types, if the loss is a dataclass."""
        require_ranges(self, type(self).__name__)

    @property
    def needs(self) -> Set[str]:
        """Return the columns that the loss reads in addition to those of every batch.

        A loss that needs `group` gets all rows of a group in one micro-batch. It gathers once per
        micro-batch, so a group may span processes with equal numbers of micro-batches. Samples
        without a needed label are dropped. Default: `reference`.
        """
        return {"reference"}

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

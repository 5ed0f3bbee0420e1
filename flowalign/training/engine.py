"""Accumulate the gradients of micro-batches, and average their statistics over processes.

Every loop of training divides an update into parts. This is the only place that scales their
losses, calls backward and averages what they report.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowalign.training.learner import Learner
from flowalign.types.losses import Loss


@dataclass(frozen=True)
class Part:
    """Micro-batch of an update."""

    share: float
    """Weight of its mean loss in the loss of the update; 0 for an empty part."""
    loss: Callable[[], Loss]
    """Function that returns the mean loss and detached scalars for the log."""
    label: int = 0
    """Name of the part for the caller, such as its denoising step."""


class Accumulation:
    """Gradient of the parts of an update, and means of their statistics."""

    def __init__(self, learner: Learner, scale: float = 1.0):
        self.learner, self.scale = learner, scale
        """Learner of the gradient, and factor on the statistics (one over the updates)."""
        self.totals: dict[str, Tensor] = {}

    def add(self, parts: Iterable[Part]) -> Iterator[int]:
        """Add the gradients of parts, and yield the label of each part that has one.

        An empty part is evaluated, because its loss may gather over processes.
        """
        for part in parts:
            loss, stats = part.loss()
            if part.share:
                self.learner.backward(part.share * loss)
                self._count(stats, part.share * self.scale)
                yield part.label

    def add_all(self, parts: Iterable[Part]) -> None:
        """Add the gradients of parts."""
        deque(self.add(parts), maxlen=0)

    def means(self) -> dict[str, float]:
        """Return the statistics, averaged over the parts of all processes; all must call it."""
        values = torch.stack(list(self.totals.values())).tolist() if self.totals else []
        return self.learner.processes.sum_by_name(dict(zip(self.totals, values, strict=True)))

    def _count(self, stats: Mapping[str, Tensor], weight: float) -> None:
        device = self.learner.processes.device
        for name, value in stats.items():
            self.totals[name] = self.totals.get(name, 0.0) + weight * value.float().to(device)

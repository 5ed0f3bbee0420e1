"""Average the trained parameters over updates, with exponentially falling weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Updates average <- decay * average + (1 - decay) * parameters every `every` optimizer steps.

    The decay starts lower, at min(decay, (1 + n) / (ramp + n)) after n averagings, so that the
    start does not drown the first updates; with ramp 1 it is the same throughout.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], decay: float, every: int = 1, ramp: int = 10
    ):
        if not 0 <= decay < 1 or every < 1:
            raise ValueError(
                f"ema decay {decay}, every {every}: decay must be in [0, 1), every at least 1"
            )
        self.parameters, self.decay, self.every = list(parameters), decay, every
        self.ramp = ramp
        self.average = [p.detach().clone() for p in self.parameters]
        self.num_updates = 0

    @torch.no_grad()
    def update(self, optimizer_step: int) -> None:
        """Include the parameters after an optimizer step."""
        if optimizer_step % self.every:
            return
        decay = min(self.decay, (1 + self.num_updates) / (self.ramp + self.num_updates))
        self.num_updates += 1
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the parameters to the average inside the context, and restore them afterwards."""
        kept = [p.detach().clone() for p in self.parameters]
        self.write()
        try:
            yield
        finally:
            self._write(kept)

    def write(self) -> None:
        """Set the parameters to the average."""
        self._write(self.average)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self.parameters, values, strict=True):
            p.copy_(value)

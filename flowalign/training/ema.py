"""Average the trained parameters over updates, with exponentially falling weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flowalign.types.ranges import (
    Decay,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnitInterval,
)


@dataclass(frozen=True, kw_only=True)
class Ema:
    """Configures averaged weights, which are evaluated and saved beside the live ones."""

    decay: Decay = 0.9
    """Decay of the average, in [0, 1). Default: 0.9, as in Flow-GRPO's code."""
    every: PositiveInt = 1
    """Optimizer updates between two averagings. Flow-GRPO's code: 8."""

    def __post_init__(self) -> None:
        """Reject settings that average nothing, before weights are read."""
        if not 0 <= self.decay < 1 or self.every < 1:
            raise ValueError(
                f"ema.decay {self.decay}, every {self.every}: need 0 <= decay < 1, every >= 1"
            )


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Raises the decay of an average linearly: `start` up to averaging `flat`, then a ramp.

    The decay of averaging n, counted from 1, is `start` if n <= flat, else min(start + (n - flat)
    slope, highest). The three schedules of DiffusionNFT's code, arXiv:2509.16117, are a copy,
    decay 0; slope .001 to .5; and flat 75, slope .0075 to .999.
    """

    start: UnitInterval = 0.0
    """Decay up to averaging `flat`; 0 copies the policy, 1 keeps the average as it is."""
    flat: NonNegativeInt = 0
    """Number of averagings before the ramp."""
    slope: NonNegativeFloat = 0.0
    """Rise of the decay per averaging after these."""
    highest: Decay
    """Upper bound of the decay after these, in [0, 1)."""

    def __post_init__(self) -> None:
        """Reject decays outside [0, 1] and a ramp that falls."""
        if not (0 <= self.start <= 1 and 0 <= self.highest < 1 and self.slope >= 0):
            raise ValueError(
                f"decay: start {self.start}, slope {self.slope}, highest {self.highest}; "
                "need start in [0, 1], slope at least 0, highest in [0, 1)"
            )

    def at(self, n: int) -> float:
        """Return the decay of averaging n, counted from 1."""
        if n <= self.flat:
            return self.start
        return min(self.start + (n - self.flat) * self.slope, self.highest)


class EMA:
    """Updates average <- decay * average + (1 - decay) * parameters.

    It does so every `every` optimizer steps or, per step, after each step of the loop. A number is
    the largest decay: it starts lower, at min(decay, (1 + n) / (10 + n)) after n averagings, so
    that the start does not drown the first updates. A function gives the decay of averaging n,
    counted from 1, itself.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        decay: float | Callable[[int], float],
        every: int = 1,
        per: Literal["update", "step"] = "update",
    ):
        if every < 1 or (not callable(decay) and not 0 <= decay < 1):
            raise ValueError(
                f"ema decay {decay}, every {every}: decay must be in [0, 1), every at least 1"
            )
        self.parameters, self.every, self.per = list(parameters), every, per
        self.decay = decay if callable(decay) else lambda n: min(decay, n / (9 + n))
        self.average = [p.detach().clone() for p in self.parameters]
        self.num_updates = 0

    def update(self, optimizer_step: int) -> None:
        """Include the parameters after an optimizer step, if it is the turn of one."""
        if self.per == "update" and optimizer_step % self.every == 0:
            self._include()

    def end_step(self) -> None:
        """Include the parameters after a step of the loop, if these count."""
        if self.per == "step":
            self._include()

    @torch.no_grad()
    def _include(self) -> None:
        self.num_updates += 1
        weight = 1 - self.decay(self.num_updates)
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], weight)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the parameters, as at its start."""
        for own, p in zip(self.average, self.parameters, strict=True):
            own.copy_(p)

    @torch.no_grad()
    def move(self, places: Sequence[Tensor]) -> None:
        """Keep the average in these tensors from now on."""
        for place, value in zip(places, self.average, strict=True):
            place.copy_(value)
        self.average = list(places)

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

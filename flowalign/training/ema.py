"""Exponential moving averages of the trained parameters."""

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
    require_ranges,
)


@dataclass(frozen=True, kw_only=True)
class Ema:
    """Settings of averaged weights, which are evaluated and saved with the current weights."""

    decay: Decay = 0.9
    """Decay of the average, in [0, 1). Default: 0.9, as in Flow-GRPO's code."""
    every: PositiveInt = 1
    """Number of optimizer updates between two averagings. Flow-GRPO's code: 8."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "ema")


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Schedule of an average's decay: constant for `flat` averagings, then a linear ramp.

    The decay of averaging n, counted from 1, is `start` if n <= flat, else min(start + (n - flat)
    slope, highest). The schedules in DiffusionNFT's code, arXiv:2509.16117, are: decay 0 (a copy);
    slope 0.001 up to 0.5; flat 75 and slope 0.0075 up to 0.999.
    """

    start: UnitInterval = 0.0
    """Decay during the first `flat` averagings. 0: copies the policy. 1: keeps the average."""
    flat: NonNegativeInt = 0
    """Number of averagings before the ramp."""
    slope: NonNegativeFloat = 0.0
    """Increase of the decay per averaging on the ramp."""
    highest: Decay
    """Upper bound of the decay on the ramp, in [0, 1)."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "decay")

    def at(self, n: int) -> float:
        """Return the decay of averaging n, counted from 1."""
        if n <= self.flat:
            return self.start
        return min(self.start + (n - self.flat) * self.slope, self.highest)


class EMA:
    """Moving average: average <- decay * average + (1 - decay) * parameters.

    It is updated every `every` optimizer updates or, with `per` step, after each training step. If
    `decay` is a number, the decay after n averagings is min(decay, (1 + n) / (10 + n)), so that the
    initial weights do not dominate. If `decay` is a function, it returns the decay of averaging n,
    counted from 1.
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
        """Include the parameters after every `every` optimizer updates, if `per` is update."""
        if self.per == "update" and optimizer_step % self.every == 0:
            self._include()

    def end_step(self) -> None:
        """Include the parameters after a training step, if `per` is step."""
        if self.per == "step":
            self._include()

    @torch.no_grad()
    def _include(self) -> None:
        self.num_updates += 1
        weight = 1 - self.decay(self.num_updates)
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], weight)

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the average to the current parameters."""
        for own, p in zip(self.average, self.parameters, strict=True):
            own.copy_(p)

    @torch.no_grad()
    def move(self, places: Sequence[Tensor]) -> None:
        """Store the average in the tensors `places` from now on."""
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

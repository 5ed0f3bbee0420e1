"""Which denoising steps are stochastic and trained: one choice per iteration, for all samples."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from typing_extensions import override


class SDEWindow(ABC):
    """Chooses the SDE steps of an iteration; all other steps are ODE steps."""

    @abstractmethod
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Increasing step indices in [0, num_steps). ValueError if the window does not fit."""


@dataclass(frozen=True)
class AllButLast(SDEWindow):
    """Every step but the last, whose noise would reach the picture.

    Source: Flow-GRPO, arXiv:2505.05470v5.
    """

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """0, ..., num_steps - 2."""
        return _inside(0, num_steps - 1, num_steps)


@dataclass(frozen=True)
class Fixed(SDEWindow):
    """Steps start, ..., stop - 1."""

    start: int
    stop: int

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """The same steps each time."""
        return _inside(self.start, self.stop, num_steps)


@dataclass(frozen=True)
class Random(SDEWindow):
    """`size` consecutive steps starting at a uniform draw from [low, high).

    Source: Flow-GRPO-Fast (code of arXiv:2505.05470): size 2 or 3, start in the first half.
    """

    size: int = 2
    low: int = 0
    high: int | None = None
    """None: half the steps."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """One draw from the generator."""
        high = num_steps // 2 if self.high is None else self.high
        if not self.low < high:
            raise ValueError(
                f"random window draws its start from [{self.low}, {high}), which is empty"
            )
        for start in (self.low, high - 1):
            _inside(start, start + self.size, num_steps)
        start = int(torch.randint(self.low, high, (), generator=generator))
        return _inside(start, start + self.size, num_steps)


@dataclass(frozen=True)
class RandomSubset(SDEWindow):
    """A random `share` of all steps but the last. Source: DanceGRPO, arXiv:2505.07818v4, 0.6."""

    share: float = 0.6

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """A fresh subset each iteration."""
        count = int(self.share * (num_steps - 1))
        if not 1 <= count <= num_steps - 1:
            raise ValueError(
                f"share {self.share} of {num_steps - 1} steps is {count} steps; need at least 1"
            )
        return tuple(sorted(torch.randperm(num_steps - 1, generator=generator)[:count].tolist()))


@dataclass(frozen=True)
class Sliding(SDEWindow):
    """`size` steps that move by `stride` every `every` iterations and stop at the schedule's end.

    Source: MixGRPO, arXiv:2507.21802v7: size 4, every 25, stride 1. Its code lets the last windows
    shrink; here the window stays whole.
    """

    size: int = 4
    every: int = 25
    stride: int = 1

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """The window of this iteration."""
        if self.every < 1 or self.stride < 1:
            raise ValueError(
                f"sliding window with every {self.every}, stride {self.stride}: need at least 1"
            )
        _inside(0, self.size, num_steps)
        start = min(self.stride * (iteration // self.every), num_steps - self.size)
        return _inside(start, start + self.size, num_steps)


@dataclass(frozen=True)
class Geometric(SDEWindow):
    """`size` consecutive steps, starting at i with probability proportional to ratio^i.

    Source: TreeGRPO, arXiv:2512.08153, size 3 and ratio 0.5.
    """

    size: int = 3
    ratio: float = 0.5

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """One draw among the starts that leave the last step an ODE step."""
        if not 0 < self.ratio <= 1:
            raise ValueError(f"geometric window with ratio {self.ratio}; it must lie in (0, 1]")
        _inside(0, self.size, num_steps - 1)
        chance = self.ratio ** torch.arange(num_steps - self.size, dtype=torch.float64)
        start = int(torch.multinomial(chance, 1, generator=generator))
        return _inside(start, start + self.size, num_steps)


@dataclass(frozen=True)
class Backward(SDEWindow):
    """The last steps, `first` of them in the beginning and one more every `every` iterations.

    The very last step, whose noise would reach the picture, is counted but stays an ODE step.

    Source: B2-DiffuRL, arXiv:2503.11240: of 20 steps the last 14, growing to all in 100 stages.
    """

    first: int = 14
    every: int = 14

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """The window of this iteration."""
        if self.every < 1 or not 2 <= self.first <= num_steps:
            raise ValueError(
                f"backward window with first {self.first}, every {self.every}: "
                f"first must lie in [2, {num_steps}], every be at least 1"
            )
        size = min(self.first + iteration // self.every, num_steps)
        return _inside(num_steps - size, num_steps - 1, num_steps)


def _inside(start: int, stop: int, num_steps: int) -> tuple[int, ...]:
    if not 0 <= start < stop <= num_steps:
        raise ValueError(
            f"window [{start}, {stop}) lies outside the schedule of {num_steps} steps "
            f"[0, {num_steps})"
        )
    return tuple(range(start, stop))

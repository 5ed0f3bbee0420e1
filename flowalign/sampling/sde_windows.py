"""Choose which denoising steps are stochastic and trained: one choice per step of the loop."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from typing_extensions import override

from flowalign.types.ranges import NonNegativeInt, PositiveInt, Range


class SDEWindow(ABC):
    """Chooses the SDE steps of a step of the loop; all other steps are ODE steps."""

    @abstractmethod
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return increasing step indices in [0, num_steps).

        `iteration` is the index of the step of the loop.

        Raises:
            ValueError: The window does not fit the schedule.
        """


@dataclass(frozen=True)
class AllButLast(SDEWindow):
    """Chooses every step but the last, whose noise would stay visible in the picture.

    Source: Flow-GRPO, arXiv:2505.05470v5.
    """

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return 0, ..., num_steps - 2."""
        return _check_window(0, num_steps - 1, num_steps)


@dataclass(frozen=True)
class NoSteps(SDEWindow):
    """Chooses no step: the sampler is deterministic, and nothing of it can be trained by itself."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Fixed(SDEWindow):
    """Chooses steps start, ..., stop - 1."""

    start: NonNegativeInt
    """Index of the first step."""
    stop: PositiveInt
    """Index after the last step."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        return _check_window(self.start, self.stop, num_steps)


@dataclass(frozen=True)
class Random(SDEWindow):
    """Chooses `size` consecutive steps, starting at a uniform draw from [low, high).

    Source: Flow-GRPO-Fast (code of arXiv:2505.05470): size 2 or 3, start in the first half.
    """

    size: PositiveInt = 2
    """Number of steps."""
    low: NonNegativeInt = 0
    """Smallest index of the first step."""
    high: PositiveInt | None = None
    """Index above the largest first step; null: half the number of steps."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Draw the first step once."""
        high = num_steps // 2 if self.high is None else self.high
        if not self.low < high:
            raise ValueError(
                f"random window draws its start from [{self.low}, {high}), which is empty"
            )
        for start in (self.low, high - 1):
            _check_window(start, start + self.size, num_steps)
        start = int(torch.randint(self.low, high, (), generator=generator))
        return _check_window(start, start + self.size, num_steps)


@dataclass(frozen=True)
class RandomSubset(SDEWindow):
    """Chooses a random `share` of all steps but the last, or of the first `stop`.

    Source: DanceGRPO, arXiv:2505.07818v4, 0.6 of all steps but the last; there the others stay
    stochastic, too, as `untrained_steps: sde` makes them.
    """

    share: Annotated[float, Range(above=0, most=1)] = 0.6
    """Share of these steps that are chosen, rounded down to a number of steps."""
    stop: PositiveInt | None = None
    """Index after the last step that can be chosen; null: all steps but the last."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Draw a new subset for each step of the loop."""
        stop = num_steps - 1 if self.stop is None else self.stop
        if not stop <= num_steps:
            raise ValueError(f"random subset of the first {stop} steps; there are {num_steps}")
        count = int(self.share * stop)
        if not 1 <= count <= stop:
            raise ValueError(
                f"share {self.share} of {stop} steps is {count} steps; need at least 1"
            )
        return tuple(sorted(torch.randperm(stop, generator=generator)[:count].tolist()))


@dataclass(frozen=True)
class Sliding(SDEWindow):
    """Moves a window of `size` steps by `stride` every `every` steps of the loop, up to the end.

    Source: MixGRPO, arXiv:2507.21802v7: size 4, every 25, stride 1. Its code lets the last windows
    shrink; here the window stays whole.
    """

    size: PositiveInt = 4
    """Number of denoising steps in the window."""
    every: PositiveInt = 25
    """Steps of the loop between two moves."""
    stride: PositiveInt = 1
    """Denoising steps by which the window moves."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return the window of this step of the loop."""
        if self.every < 1 or self.stride < 1:
            raise ValueError(
                f"sliding window with every {self.every}, stride {self.stride}: need at least 1"
            )
        _check_window(0, self.size, num_steps)
        start = min(self.stride * (iteration // self.every), num_steps - self.size)
        return _check_window(start, start + self.size, num_steps)


@dataclass(frozen=True)
class Geometric(SDEWindow):
    """Chooses `size` consecutive steps, starting at i with probability proportional to ratio^i.

    Source: TreeGRPO, arXiv:2512.08153, size 3 and ratio 0.5.
    """

    size: PositiveInt = 3
    """Number of steps."""
    ratio: Annotated[float, Range(above=0, most=1)] = 0.5
    """Ratio of the probabilities of consecutive starts, in (0, 1]."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Draw among the starts that leave the last step an ODE step."""
        if not 0 < self.ratio <= 1:
            raise ValueError(f"geometric window with ratio {self.ratio}; it must lie in (0, 1]")
        _check_window(0, self.size, num_steps - 1)
        chance = self.ratio ** torch.arange(num_steps - self.size, dtype=torch.float64)
        start = int(torch.multinomial(chance, 1, generator=generator))
        return _check_window(start, start + self.size, num_steps)


@dataclass(frozen=True)
class Backward(SDEWindow):
    """Chooses the last `first` steps, and one more after every `every` steps of the loop.

    The very last step, whose noise would stay visible, is counted but stays an ODE step.

    Source: B2-DiffuRL, arXiv:2503.11240: of 20 steps the last 14, growing to all in 100 stages.
    """

    first: PositiveInt = 14
    """Number of last steps in the first step of the loop, at least 2."""
    every: PositiveInt = 14
    """Steps of the loop after which the window grows by one denoising step."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return the window of this step of the loop."""
        if self.every < 1 or not 2 <= self.first <= num_steps:
            raise ValueError(
                f"backward window with first {self.first}, every {self.every}: "
                f"first must lie in [2, {num_steps}], every be at least 1"
            )
        size = min(self.first + iteration // self.every, num_steps)
        return _check_window(num_steps - size, num_steps - 1, num_steps)


def _check_window(start: int, stop: int, num_steps: int) -> tuple[int, ...]:
    if not 0 <= start < stop <= num_steps:
        raise ValueError(
            f"window [{start}, {stop}) lies outside the schedule of {num_steps} steps "
            f"[0, {num_steps})"
        )
    return tuple(range(start, stop))

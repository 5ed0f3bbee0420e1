"""Draw the noise levels at which latents are matched: sigma is 1 at noise and 0 at data."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import Policy
from flowalign.types.ranges import (
    DenoisingSteps,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    require_ranges,
)

Schedule = Callable[[int], Float[Tensor, "S"]]
"""Function from a number of steps to the sigmas of the model's sampler."""
_ROUNDING = 1e-5


class Times(ABC):
    """Distribution of sigma; the rows of a pair share a draw."""

    @abstractmethod
    def highest(self, schedule: Schedule) -> float:
        """Return an upper bound of all draws."""

    def check(self, schedule: Schedule, per_sample: int = 1) -> None:
        """Raise ValueError if draws exceed the trained noise range, or if there are too many."""
        if self.most is not None and per_sample > self.most:
            raise ValueError(
                f"recipe.times_per_sample is {per_sample}, but recipe.times has {self.most} "
                "different noise levels: lower it, or set times.distinct to false"
            )
        highest, trained = self.highest(schedule), float(schedule(1)[0])
        if highest > trained + _ROUNDING:
            raise ValueError(
                f"recipe.times {type(self).__name__} draws sigmas up to {highest:g}, but the model "
                f"was trained up to {trained:.4f}: choose SamplerGrid, which uses the model's "
                "sigmas, or Uniform with a lower `high`"
            )

    @property
    def most(self) -> int | None:
        """Return the largest number of noise levels of one sample; None: any number."""
        return None

    @abstractmethod
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        """Return `count` independent sigmas, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Uniform(Times):
    """Uniform distribution of sigma from `low` to `high`."""

    low: UnitInterval = 0.0
    """Smallest sigma before the shift, at least 0."""
    high: UnitInterval = 1.0
    """Largest sigma before the shift, at most 1."""
    shift: PositiveFloat = 1.0
    """Timestep shift of SD3, above 0; values above 1 shift towards noise. 1: none."""

    def __post_init__(self) -> None:
        """Reject an empty range."""
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"times: low {self.low}, high {self.high}; need 0 <= low < high <= 1")

    @override
    def highest(self, schedule: Schedule) -> float:
        return float(_shifted(torch.tensor(self.high), self.shift))

    @override
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        sigma = self.low + (self.high - self.low) * torch.rand(count, generator=generator)
        return sigma if self.shift == 1 else _shifted(sigma, self.shift)


@dataclass(frozen=True, kw_only=True)
class LogitNormal(Times):
    """Distribution of sigma as sigmoid(mean + std * normal), with the timestep shift of SD3.

    Source: SD3, arXiv:2403.03206; sigma -> shift * sigma / (1 + (shift - 1) * sigma). Flow-GRPO's
    DPO of SD3 draws a logit-normal quantile of a schedule with shift 3, which equals shift 3 here.
    """

    mean: FiniteFloat = 0.0
    """Mean of the normal distribution; positive values shift towards noise."""
    std: PositiveFloat = 1.0
    """Standard deviation of the normal distribution, above 0."""
    shift: PositiveFloat = 1.0
    """Timestep shift of SD3, above 0. 1: none."""

    def __post_init__(self) -> None:
        """Reject a std or shift that is not positive."""
        require_ranges(self, "times")

    @override
    def highest(self, schedule: Schedule) -> float:
        """Return 1, because every sigma below 1 has a positive density."""
        return 1.0

    @override
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        sigma = (self.mean + self.std * torch.randn(count, generator=generator)).sigmoid()
        return _shifted(sigma, self.shift)


@dataclass(frozen=True, kw_only=True)
class SamplerGrid(Times):
    """Uniform distribution over the steps `start`, ..., `stop` - 1 of the model's schedule.

    With `num_steps: 1000`, the number of trained levels, it is the uniform integer timestep of
    Diffusion-DPO. Sigma 0 is excluded.
    """

    num_steps: DenoisingSteps = 1000
    """Number of steps of the schedule."""
    start: NonNegativeInt = 0
    """Index of the first step."""
    stop: PositiveInt | None = None
    """Index after the last step. Null: num_steps. DiffusionNFT: 9 of the sampler's 10."""
    distinct: bool = False
    """Whether the noise levels of one sample are all different. Default: false."""

    def __post_init__(self) -> None:
        """Reject a range without steps."""
        stop = self.num_steps if self.stop is None else self.stop
        if not 0 <= self.start < stop <= self.num_steps:
            raise ValueError(
                f"times: start {self.start}, stop {stop}; need 0 <= start < stop <= num_steps, "
                f"which is {self.num_steps}"
            )

    @override
    def highest(self, schedule: Schedule) -> float:
        """Return the sigma of the first step."""
        return float(schedule(self.num_steps)[self.start])

    @property
    def steps(self) -> range:
        """Return the steps with a start that can be drawn."""
        return range(self.start, self.num_steps if self.stop is None else self.stop)

    @property
    @override
    def most(self) -> int | None:
        """Return the number of levels if `distinct` is set, else None."""
        return len(self.steps) if self.distinct else None

    @override
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        levels = policy.schedule(self.num_steps)[:-1][self.start : self.stop].cpu()
        if self.distinct:
            return levels[torch.randperm(len(levels), generator=generator)[:count]].float()
        return levels[torch.randint(len(levels), (count,), generator=generator)].float()


def _shifted(sigma: Tensor, shift: float) -> Tensor:
    return shift * sigma / (1 + (shift - 1) * sigma)

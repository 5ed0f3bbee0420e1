"""At which noise levels latents are matched. Sigma is 1 at noise and 0 at data, always."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import Policy

Schedule = Callable[[int], Float[Tensor, "S"]]
"""Number of steps to the sigmas of a model's own sampler: that of a `Policy`, or of its plan."""
_ROUNDING = 1e-5


class Times(ABC):
    """A distribution of sigma; rows of a pair share a draw."""

    @abstractmethod
    def highest(self, schedule: Schedule) -> float:
        """No draw is above it."""

    def check(self, schedule: Schedule) -> None:
        """Raise ValueError where draws may be noisier than anything the model was trained on."""
        highest, trained = self.highest(schedule), float(schedule(1)[0])
        if highest > trained + _ROUNDING:
            raise ValueError(
                f"recipe.times {type(self).__name__} draws sigmas up to {highest:g}, but the model "
                f"was trained up to {trained:.4f}: choose SamplerGrid, whose sigmas are the "
                "model's own, or Uniform with a lower `high`"
            )

    @abstractmethod
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        """So many independent sigmas, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Uniform(Times):
    """All levels from `low` to `high` alike."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"times: low {self.low}, high {self.high}; need 0 <= low < high <= 1")

    @override
    def highest(self, schedule: Schedule) -> float:
        """As told."""
        return self.high

    @override
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        """Uniform numbers."""
        return self.low + (self.high - self.low) * torch.rand(count, generator=generator)


@dataclass(frozen=True, kw_only=True)
class LogitNormal(Times):
    """sigmoid(mean + std * normal), then moved towards noise by the shift of SD3.

    Source: SD3, arXiv:2403.03206; sigma -> shift * sigma / (1 + (shift - 1) * sigma). Flow-GRPO's
    DPO of SD3 draws a logit-normal quantile of a schedule with shift 3: this with shift 3.
    """

    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no distribution on (0, 1)."""
        if not (self.std > 0 and self.shift > 0):
            raise ValueError(f"times: std {self.std}, shift {self.shift}; both must be above 0")

    @override
    def highest(self, schedule: Schedule) -> float:
        """Any below 1 is drawn some day."""
        return 1.0

    @override
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        """Shifted logit-normal numbers."""
        sigma = (self.mean + self.std * torch.randn(count, generator=generator)).sigmoid()
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)


@dataclass(frozen=True, kw_only=True)
class SamplerGrid(Times):
    """The noise levels of the model's own schedule, from step `start` up to `stop`, all alike.

    With `num_steps` the number of levels it was trained on, 1000, this is the uniform integer
    timestep of Diffusion-DPO. The clean end is not among them.
    """

    num_steps: int = 1000
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        """Refuse a range of no steps."""
        stop = self.num_steps if self.stop is None else self.stop
        if not 0 <= self.start < stop <= self.num_steps:
            raise ValueError(
                f"times: start {self.start}, stop {stop}; need 0 <= start < stop <= num_steps, "
                f"which is {self.num_steps}"
            )

    @override
    def highest(self, schedule: Schedule) -> float:
        """The first of its levels."""
        return float(schedule(self.num_steps)[self.start])

    @override
    def draw(self, count: int, policy: Policy, generator: torch.Generator) -> Float[Tensor, "n"]:
        """Levels of the schedule."""
        levels = policy.schedule(self.num_steps)[:-1][self.start : self.stop].cpu()
        return levels[torch.randint(len(levels), (count,), generator=generator)].float()

"""Choose the noise levels and the states at which velocities are matched.

Sigma is 1 at noise and 0 at data. States are noised latents, off the path, or visited.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import (
    add_noise,
    level_after,
    point_weights,
    renoise,
    velocity_to_data,
)
from flowalign.functional.transition import per_row
from flowalign.training.reference import Guided, conditional, find_scale
from flowalign.types import Batch, Policy, VelocityField
from flowalign.utils.ranges import (
    DenoisingSteps,
    FiniteFloat,
    GuidanceScale,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    UnitInterval,
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
class LogitNormal(Times, Settings, key="times"):
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


_SCHEDULE = 1000
"""Number of steps of the schedule that defines the length of a step."""


class StateSource(ABC):
    """Choice of the states at which velocities are matched."""

    visited: ClassVar[bool] = False
    """Whether the states are the visited states of the examples' trajectories."""

    @property
    def rows(self) -> int:
        """Return the number of matched states per row and noise level.

        All but the first need one random number each.
        """
        return 1

    def scale(self, policy: Policy) -> float | None:  # noqa: ARG002
        """Return the guidance scale of the policy's step to the states; None if there is no step.

        The step takes two evaluations per noise level, or one without guidance.
        """
        return None

    def field(self, policy: Policy) -> VelocityField | None:
        """Return the velocity field of the step; raise ValueError if guidance is missing."""
        scale = self.scale(policy)
        if scale is None:
            return None
        return Guided(policy, scale) if scale > 1 else conditional(policy)

    @abstractmethod
    def build(self, part: Batch, policy: Policy, field: VelocityField | None) -> Batch:
        """Return noised examples with their states `x`, `sigma` and the velocities to the data.

        `field` is the result of the method `field`. The velocities are the column `target`.
        """


@dataclass(frozen=True)
class ForwardNoise(StateSource):
    """Noised clean latents, as in flow matching."""

    @override
    def build(self, part: Batch, policy: Policy, field: VelocityField | None) -> Batch:
        latents, noise = part["latents"], part["noise"]
        x = add_noise(latents, noise, part["sigma"])
        return part.with_columns(x=x, target=noise - latents)


@dataclass(frozen=True)
class VisitedStates(ForwardNoise):
    """States that the policy visited during sampling.

    They need the data source `OnPolicyStates`, and `recipe.times` chooses among them. A visited
    state equals its final sample plus an individual noise.
    """

    visited = True


@dataclass(frozen=True, kw_only=True)
class GuidedStep(StateSource, Settings, key="recipe.states"):
    """Noised latents, and states that are reached from them by one step of the policy (SOAR).

    From the noised latent, the policy takes one guided Euler step without gradient. The reached
    state is noised again to several levels with the same noise. At these states, the target is the
    velocity to the data. The defaults are the published values.

    Source: SOAR, arXiv:2604.12617, and code of Tencent-Hunyuan/HY-SOAR with a single path. The
    released code rounds the levels of states to the scheduler's grid; this class does not.
    """

    count: PositiveInt = 6
    """Number of further states per noised latent."""
    guidance_scale: GuidanceScale = 4.5
    """Classifier-free guidance scale of the step. 1: none. model: the scale of the policy's run
    file."""
    num_steps: DenoisingSteps = 40
    """Number of sampler steps, which defines the length of the step."""
    weight: PositiveFloat = 1.0
    """Weight of the error at a further state, relative to the error at the noised latent."""

    @property
    @override
    def rows(self) -> int:
        return 1 + self.count

    @override
    def scale(self, policy: Policy) -> float:
        return find_scale(policy, self.guidance_scale)

    @override
    def build(self, part: Batch, policy: Policy, field: VelocityField | None) -> Batch:
        """Return the noised latents, then the first further state of each, then the second, ..."""
        assert field is not None, "the field of the step was not opened"
        latents, noise, sigma = part["latents"], part["noise"], part["sigma"]
        x = add_noise(latents, noise, sigma)
        after = level_after(policy.schedule(_SCHEDULE).to(sigma), sigma, 1 / self.num_steps)
        with torch.no_grad():
            reached = x + per_row(after - sigma, x) * field.velocity(x, sigma, part["cond"])
        levels = [after + (1 - after) * drawn for drawn in part["uniform"].to(sigma).unbind(1)]
        states = [renoise(reached, noise, after, level) for level in levels]
        rows = part.take(torch.arange(len(sigma)).repeat(self.rows))
        own, each = point_weights(self.count, self.weight)
        scale = torch.full_like(rows["weight"], each)
        scale[: len(sigma)] = own
        targets = [velocity_to_data(p, latents, s) for p, s in zip(states, levels, strict=True)]
        return rows.with_columns(
            weight=rows["weight"] * scale,
            x=torch.cat([x, *states]),
            sigma=torch.cat([sigma, *levels]),
            target=torch.cat([noise - latents, *targets]),
        )

"""Choose the states at which velocities are matched: noised, off the path, or visited."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
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
from flowalign.types.ranges import (
    DenoisingSteps,
    GuidanceScale,
    PositiveFloat,
    PositiveInt,
    require_ranges,
)

_SCHEDULE = 1000
"""Number of steps of the schedule that defines the length of a step."""


class StateSource(ABC):
    """Choice of the states at which velocities are matched."""

    visited: ClassVar[bool] = False
    """Whether the states are the visited states of the examples' trajectories."""

    @property
    def rows(self) -> int:
        """Return the number of matched states per row and noise level."""
        return 1

    @property
    def draws(self) -> int:
        """Return the number of random numbers that each noise level needs."""
        return 0

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
class GuidedStep(StateSource):
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

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "recipe.states")

    @property
    @override
    def rows(self) -> int:
        return 1 + self.count

    @property
    @override
    def draws(self) -> int:
        return self.count

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

"""FlowBP-Lagrange: gradients of two leaps, each integrated over several steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.path_gradient import (
    closeness_weight,
    rescale_factor,
    scale_gradient,
    straight_through,
)
from flowalign.functional.quadrature import lagrange_weights, support_points
from flowalign.gradient_paths.leaps import DirichletLeaps, Leaps
from flowalign.gradient_paths.steps import require_steps
from flowalign.types import (
    GradientPath,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Replay,
    SampleView,
    UnitInterval,
)


@dataclass(frozen=True, kw_only=True)
class FlowBPLagrange(GradientPath):
    """Gradient of two leaps that integrate the velocities of several steps.

    A leap integrates the polynomial through the velocities at its support points. Only the first
    `active_points` of them have a gradient. It deviates less from the rollout than a leap of
    LeapAlign.

    Source: FlowBP-Lagrange, arXiv:2606.11075. Defaults: its SD3.5-M run; FLUX.1 takes rescale 0.5.
    """

    leaps: Leaps = field(default_factory=DirichletLeaps)
    """Distribution of the steps k and j at which the two leaps start."""
    order: PositiveInt = 3
    """Largest number of support points of a leap."""
    active_points: PositiveInt = 2
    """Number of support points that the gradient reaches, counted from the start of the leap."""
    other_scale: UnitInterval = 0.25
    """Factor of the gradient at active points other than the start of the leap."""
    rescale: NonNegativeFloat = 0.0
    """Strength with which gradients are scaled up for the inactive points. 0: none, 1: fully."""
    alpha: UnitInterval = 0.1
    """Factor of the gradient through the network's input at j."""
    tau: PositiveFloat = 0.2
    """Lower bound of the distances between leap and rollout in a sample's weight. Default: 0.2."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample and its weight."""
        leaps, num_steps = self.leaps, replay.num_steps
        require_steps(f"FlowBPLagrange.leaps {type(leaps).__name__}", leaps.fewest, num_steps)
        k, j = leaps.draw(num_steps, generator)
        x0 = replay.state(num_steps)
        leap = replay.state(k) + self.integral(replay, k, j, replay.velocity(k))
        x_j = straight_through(replay.state(j), leap)
        v_j = replay.velocity(j, scale_gradient(x_j, self.alpha))
        last = x_j + self.integral(replay, j, num_steps, v_j)
        weight = closeness_weight(leap, x_j, last, x0, self.tau)
        yield SampleView(straight_through(x0, last), weight)

    def integral(
        self, replay: Replay, start: int, stop: int, v: Float[Tensor, "n *latent"]
    ) -> Float[Tensor, "n *latent"]:
        """Return the integral of the velocity from start to stop; `v` is the velocity at start."""
        points, sigmas = support_points(start, stop, self.order), replay.sigmas
        weights = lagrange_weights(sigmas[points], sigmas[start], sigmas[stop])
        active = len(points[: self.active_points])
        factor = float(rescale_factor(weights[:active], weights, self.rescale))
        total = weights[0] * scale_gradient(v, factor)
        for i, k in enumerate(points[1:], 1):
            if i < active:
                value = scale_gradient(replay.velocity(k), factor * self.other_scale)
            else:
                value = replay.cached_velocity(k)
            total = total + weights[i] * value
        return total

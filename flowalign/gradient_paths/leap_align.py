"""LeapAlign: gradients of two Euler leaps, from step k to j and from j to the end."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from flowalign.functional.path_gradient import (
    closeness_weight,
    predict_clean,
    scale_gradient,
    straight_through,
)
from flowalign.gradient_paths.leaps import Leaps, UniformLeaps
from flowalign.gradient_paths.steps import require_steps
from flowalign.types import GradientPath, PositiveFloat, Replay, SampleView, UnitInterval


@dataclass(frozen=True, kw_only=True)
class LeapAlign(GradientPath):
    """Gradient of two Euler leaps, from step k to step j and from j to the end.

    The gradient through the network's input at j is scaled by `alpha`. A sample gets a lower weight
    the further its leaps deviate from the rollout.

    Source: LeapAlign, arXiv:2604.15311, as implemented in FlowBP's code.
    """

    leaps: Leaps = field(default_factory=UniformLeaps)
    """Distribution of the steps k and j at which the two leaps start."""
    alpha: UnitInterval = 0.3
    """Factor of the gradient through the network's input at j."""
    tau: PositiveFloat = 0.1
    """Lower bound of the distances between leap and rollout in a sample's weight. Default: 0.1."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample and its weight."""
        leaps, num_steps = self.leaps, replay.num_steps
        require_steps(f"LeapAlign.leaps {type(leaps).__name__}", leaps.fewest, num_steps)
        k, j = leaps.draw(num_steps, generator)
        sigmas, x0 = replay.sigmas, replay.state(num_steps)
        leap = replay.state(k) + (sigmas[j] - sigmas[k]) * replay.velocity(k)
        x_j = straight_through(replay.state(j), leap)
        v_j = replay.velocity(j, scale_gradient(x_j, self.alpha))
        end = predict_clean(x_j, v_j, sigmas[j])
        weight = closeness_weight(leap, x_j, end, x0, self.tau)
        yield SampleView(straight_through(x0, end), weight)

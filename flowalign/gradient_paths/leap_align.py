"""LeapAlign and FlowBP-Sparse: gradients of leaps between steps, and of single steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from flowalign.functional.path_gradient import (
    closeness_weight,
    euler_sum,
    predict_clean,
    rescale_factor,
    scale_gradient,
    straight_through,
)
from flowalign.gradient_paths.steps import Leaps, UniformLeaps, draw_late_biased, require_steps
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


@dataclass(frozen=True, kw_only=True)
class FlowBPSparse(GradientPath):
    """Gradient of random steps, each weighted as in the Euler sampler.

    Source: FlowBP-Sparse, arXiv:2606.11075. Defaults: its SD3.5-M run; FLUX.1 takes 3 steps, bias
    2 and rescale 1.
    """

    active_steps: PositiveInt = 4
    """Number of steps that the gradient reaches."""
    bias: NonNegativeFloat = 1.0
    """Exponent of the draw: step i has a probability proportional to (i + 1)^bias. 0: uniform."""
    rescale: NonNegativeFloat = 0.5
    """Strength with which gradients are scaled up for the inactive steps. 0: none, 1: fully."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of the drawn steps."""
        num_steps, active_steps = replay.num_steps, self.active_steps
        require_steps(f"FlowBPSparse.active_steps {active_steps}", active_steps, num_steps)
        active = draw_late_biased(num_steps, active_steps, self.bias, generator)
        deltas = replay.sigmas.diff()
        factor = float(rescale_factor(deltas[active], deltas, self.rescale))
        path = euler_sum({k: replay.velocity(k) for k in active}, replay.sigmas)
        yield SampleView(straight_through(replay.state(num_steps), scale_gradient(path, factor)))

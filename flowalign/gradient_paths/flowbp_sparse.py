"""FlowBP-Sparse: gradients of a few, mostly late steps with detached network inputs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flowalign.functional.path_gradient import (
    euler_sum,
    rescale_factor,
    scale_gradient,
    straight_through,
)
from flowalign.gradient_paths.steps import draw_late_biased, require_steps
from flowalign.types import GradientPath, NonNegativeFloat, PositiveInt, Replay, SampleView


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

"""FlowBP-Bridge: gradients of a few steps, linked through the network input at one step j."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from flowalign.functional.path_gradient import (
    euler_sum,
    rescale_factor,
    scale_gradient,
    straight_through,
)
from flowalign.gradient_paths.leaps import Leaps, UniformLeaps
from flowalign.gradient_paths.steps import draw_late_biased, require_steps
from flowalign.types import (
    GradientPath,
    NonNegativeFloat,
    PositiveInt,
    Replay,
    SampleView,
    UnitInterval,
)


@dataclass(frozen=True, kw_only=True)
class FlowBPBridge(GradientPath):
    """Gradient of random steps before j, of step j, and of random steps after j.

    The steps before j also reach the sample through the network's input at j, scaled by `alpha`.

    Source: FlowBP-Bridge, arXiv:2606.11075. Defaults: its SD3.5-M run; FLUX.1 takes bias 2, alpha
    0.1 and rescale 1.
    """

    leaps: Leaps = field(default_factory=UniformLeaps)
    """Distribution of j, which is the second step of the drawn pair."""
    active_steps: PositiveInt = 5
    """Number of steps that the gradient reaches, at least 2. It is divided in proportion to the
    numbers of steps before and after j."""
    bias: NonNegativeFloat = 4.0
    """Exponent of the draw: step i of a part has a probability proportional to (i + 1)^bias."""
    rescale: NonNegativeFloat = 0.0
    """Strength with which gradients are scaled up for the inactive steps. 0: none, 1: fully."""
    alpha: UnitInterval = 0.5
    """Factor of the gradient through the network's input at j."""

    def __post_init__(self) -> None:
        """Reject fewer than 2 active steps."""
        if self.active_steps < 2:
            raise ValueError(
                f"recipe.gradient_path FlowBPBridge.active_steps is {self.active_steps}; it needs "
                "at least 2, one before j and j itself"
            )

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of the drawn steps."""
        num_steps, active_steps = replay.num_steps, self.active_steps
        wanted = max(active_steps, self.leaps.fewest)
        require_steps(f"FlowBPBridge.active_steps {active_steps}", wanted, num_steps)
        _, j = self.leaps.draw(num_steps, generator)
        before, after = self.draw_steps(j, num_steps, generator)
        deltas = replay.sigmas.diff()
        factor = float(rescale_factor(deltas[before + after], deltas, self.rescale))

        path = euler_sum({k: replay.velocity(k) for k in before}, replay.sigmas)
        x_j = straight_through(replay.state(j), scale_gradient(path, factor))
        velocities = {j: replay.velocity(j, scale_gradient(x_j, self.alpha))}
        velocities |= {k: replay.velocity(k) for k in after[1:]}
        rest = scale_gradient(euler_sum(velocities, replay.sigmas), factor)
        yield SampleView(straight_through(replay.state(num_steps), x_j + rest))

    def draw_steps(
        self, j: int, num_steps: int, generator: torch.Generator
    ) -> tuple[list[int], list[int]]:
        """Return the active steps before j, and the active steps from j on."""
        early = divide_steps(self.active_steps, j, num_steps - j)
        before = draw_late_biased(j, early, self.bias, generator)
        others = self.active_steps - early - 1
        later = draw_late_biased(num_steps - j - 1, others, self.bias, generator) if others else []
        return before, [j, *(j + 1 + i for i in later)]


def divide_steps(count: int, before: int, after: int) -> int:
    """Return the number of the `count` active steps that lie in the first part of a rollout.

    Steps are divided in proportion to the lengths `before` and `after`. Each part gets at least
    one step and at most its length.
    """
    share = round(count * before / (before + after))
    return min(max(share, 1, count - after), before, count - 1)

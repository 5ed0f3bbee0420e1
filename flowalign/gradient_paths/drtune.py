"""DRTune: gradients of a few steps with detached network inputs, and an early end."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flowalign.functional.path_gradient import euler_sum, predict_clean, straight_through
from flowalign.gradient_paths.steps import draw_evenly_spaced, draw_int, require_steps
from flowalign.types import GradientPath, PositiveInt, Replay, SampleView, UnitInterval


@dataclass(frozen=True, kw_only=True)
class DRTune(GradientPath):
    """Gradient of evenly spaced steps, through the clean latents that a late step predicts.

    The inputs of the network are detached, so no gradient flows from one step through another.

    Source: DRTune, arXiv:2405.00760; defaults of FlowBP's comparison, arXiv:2606.11075.
    """

    train_steps: PositiveInt = 3
    """Number of steps that the gradient reaches; fewer if the drawn end leaves fewer steps."""
    early_stop: UnitInterval = 0.4
    """Share of the last steps from which the predicting step is drawn. 0: the last step."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the clean latents that the last used step predicts."""
        num_steps, sigmas = replay.num_steps, replay.sigmas
        require_steps(f"DRTune.train_steps {self.train_steps}", self.train_steps, num_steps)
        stops = round(num_steps * self.early_stop)
        end = num_steps - (draw_int(1, stops, generator) if stops else 1)
        active = draw_evenly_spaced(end + 1, self.train_steps, generator)
        velocities = {k: replay.velocity(k) for k in active}
        before = {k: v for k, v in velocities.items() if k < end}
        x, v = replay.state(end), velocities.get(end)
        if before:
            x = straight_through(x, euler_sum(before, sigmas))
        yield SampleView(
            predict_clean(x, replay.cached_velocity(end) if v is None else v, sigmas[end])
        )

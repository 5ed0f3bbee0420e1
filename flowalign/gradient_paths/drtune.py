"""DRTune: few steps, none through another, and an early end."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flowalign.functional.path_gradient import euler_sum, predict_clean, straight_through
from flowalign.gradient_paths.steps import draw_evenly_spaced, draw_int, require_steps
from flowalign.types import GradientPath, PositiveInt, Replay, SampleView, UnitInterval


@dataclass(frozen=True, kw_only=True)
class DRTune(GradientPath):
    """Scores the clean latents that a late step predicts, connected to evenly spaced steps.

    The inputs of the network are detached, so that no gradient flows through one step to another.

    Source: DRTune, arXiv:2405.00760; numbers of FlowBP's comparison, arXiv:2606.11075.
    """

    train_steps: PositiveInt = 3
    """Number of steps that the gradient reaches, fewer if the rollout ends before."""
    early_stop: UnitInterval = 0.4
    """Share of last steps among which the end is drawn; 0: the last step."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the prediction of the end."""
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

"""ReFL: the reward of the clean latents that one late step predicts."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flowalign.functional.path_gradient import predict_clean
from flowalign.gradient_paths.steps import draw_int, require_steps
from flowalign.types import GradientPath, PositiveInt, Replay, SampleView


@dataclass(frozen=True, kw_only=True)
class ReFL(GradientPath):
    """Gradient of the one-step prediction x_k - sigma_k v(x_k) at one late step k.

    Source: ImageReward, arXiv:2304.05977, which draws k from the last 10 of 40 steps. The default
    follows FlowBP's comparison, arXiv:2606.11075, with 25 steps.
    """

    last_steps: PositiveInt = 11
    """Number of last steps from which k is drawn uniformly."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the clean latents that one step predicts."""
        require_steps(f"ReFL.last_steps {self.last_steps}", self.last_steps, replay.num_steps)
        k = replay.num_steps - draw_int(1, self.last_steps, generator)
        yield SampleView(predict_clean(replay.state(k), replay.velocity(k), replay.sigmas[k]))

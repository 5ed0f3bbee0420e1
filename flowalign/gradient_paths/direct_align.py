"""Direct-Align: one denoising step from a state with known noise, and the clean latents after it.

Source: SRPO, arXiv:2509.06942.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.path_gradient import recover_clean
from flowalign.gradient_paths.steps import draw_int
from flowalign.types import GradientPath, Replay, SampleView
from flowalign.utils.ranges import PositiveInt, Range


@dataclass(frozen=True, kw_only=True)
class DirectAlign(GradientPath):
    """Gradient of one policy step on a sample with known noise, which is then removed exactly.

    The result looks clean at any noise level, unlike a one-step prediction. `both` also takes a
    step towards noise. A relative reward swaps its prompts for that step.

    Noise levels come from a grid of `num_points` sigmas between two points of the sampler's
    schedule. If the second step would start beyond the grid, it starts at the end of the grid. The
    released code ends one point away from the first step in this case.

    Source: SRPO, arXiv:2509.06942; its code, Tencent-Hunyuan/SRPO. Defaults: its HPSv2.1 run.
    """

    directions: Literal["denoise", "both"] = "denoise"
    """denoise: one step towards data. both: also one step towards noise."""
    schedule_steps: PositiveInt = 50
    """Number of steps of the schedule that `window` refers to."""
    window: tuple[PositiveInt, PositiveInt] = (5, 25)
    """First and last point of the schedule between which noise levels are drawn."""
    num_points: Annotated[int, Range(least=20, most=100_000)] = 1000
    """Number of noise levels in the grid over `window`."""
    longest: Annotated[float, Range(above=0, most=1)] = 0.1
    """Longest step, as a share of the grid. Steps near the ends of the grid are shorter."""

    def __post_init__(self) -> None:
        """Reject a window outside the schedule."""
        super().__post_init__()
        first, last = self.window
        if not first < last <= self.schedule_steps:
            raise ValueError(
                f"recipe.gradient_path DirectAlign.window is {list(self.window)}; it needs first < "
                f"last <= schedule_steps, which is {self.schedule_steps}"
            )

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the latents after the step towards data, then after the step towards noise."""
        middle = draw_int(5, self.num_points - 5, generator)
        yield self._step(replay, *self.denoising(middle))
        if self.directions == "both":
            yield self._step(replay, *self.inverting(middle))

    def length(self, middle: int) -> int:
        """Return the length of a step in points; `middle` counts points from the clean end."""
        return min(round(self.longest * self.num_points), self.num_points - middle, middle)

    def denoising(self, middle: int) -> tuple[int, int]:
        """Return the start and end of a step towards data, in points from the noisy end."""
        clean = self.num_points - middle
        return clean - self.length(middle), clean

    def inverting(self, middle: int) -> tuple[int, int]:
        """Return the start and end of a step towards noise, in points from the noisy end."""
        clean = self.num_points - middle
        return min(clean + self.length(middle), self.num_points - 1), clean

    def grid(self, replay: Replay) -> Float[Tensor, "m"]:
        """Return the sigmas of all points, from the noisy end."""
        sigmas = replay.schedule(self.schedule_steps)
        first, last = (float(sigmas[i]) for i in self.window)
        return torch.linspace(first, last, self.num_points, device=sigmas.device)

    def _step(self, replay: Replay, start: int, stop: int) -> SampleView:
        sigma, target = self.grid(replay)[[start, stop]]
        clean, noise = replay.state(replay.num_steps), replay.initial_noise()
        x = add_noise(clean, noise, sigma.expand(len(clean)))
        x = x + (target - sigma) * replay.velocity_at(x, sigma)
        place = (self.num_points - max(start, stop)) / (self.num_points - 1)
        return SampleView(recover_clean(x, noise, target), inverted=start > stop, place=place)

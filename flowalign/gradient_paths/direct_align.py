"""Direct-Align: one step from a state whose noise is known, and the clean latents it leads to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.path_gradient import recover_clean
from flowalign.gradient_paths.steps import draw_int
from flowalign.types import GradientPath, PositiveInt, Range, Replay, SampleView


@dataclass(frozen=True, kw_only=True)
class DirectAlign(GradientPath):
    """Noises the sample by known noise, takes one step of the policy, and removes the noise again.

    What is left looks clean at any noise level, unlike a prediction. `both` also takes a step
    towards noise, at which a relative reward swaps its prompts.

    The grid has `num_points` sigmas between two points of the sampler's schedule. Where the
    released code's second step starts beyond the grid it misses the first by one point; here it
    starts at the grid's end.

    Source: SRPO, arXiv:2509.06942; its code, Tencent-Hunyuan/SRPO. Defaults: its HPSv2.1 run.
    """

    directions: Literal["denoise", "both"] = "denoise"
    """denoise: a step towards data. both: then one towards noise."""
    schedule_steps: PositiveInt = 50
    """Steps of the schedule that `window` counts in."""
    window: tuple[PositiveInt, PositiveInt] = (5, 25)
    """First and last point of the schedule between which noise levels are drawn."""
    num_points: Annotated[int, Range(least=20, most=100_000)] = 1000
    """Points of the grid between them."""
    longest: Annotated[float, Range(above=0, most=1)] = 0.1
    """Length of the step as a share of the grid, shorter near its ends."""

    def __post_init__(self) -> None:
        """Reject a window outside the schedule."""
        first, last = self.window
        if not first < last <= self.schedule_steps:
            raise ValueError(
                f"recipe.gradient_path DirectAlign.window is {list(self.window)}; it needs first < "
                f"last <= schedule_steps, which is {self.schedule_steps}"
            )

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the latents after a step towards data, and after one towards noise."""
        middle = draw_int(5, self.num_points - 5, generator)
        yield self._step(replay, *self.denoising(middle))
        if self.directions == "both":
            yield self._step(replay, *self.inverting(middle))

    def length(self, middle: int) -> int:
        """Return the points that a step passes; `middle` counts points from the clean end."""
        return min(round(self.longest * self.num_points), self.num_points - middle, middle)

    def denoising(self, middle: int) -> tuple[int, int]:
        """Return the points, from the noisy end, of a step towards data."""
        clean = self.num_points - middle
        return clean - self.length(middle), clean

    def inverting(self, middle: int) -> tuple[int, int]:
        """Return the points, from the noisy end, of a step towards noise."""
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

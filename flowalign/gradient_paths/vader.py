"""VADER: gradient of one sampler step, with rewards on a few frames of a video."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from flowalign.functional.path_gradient import euler_sum, straight_through
from flowalign.gradient_paths.steps import draw_int
from flowalign.types import GradientPath, NonNegativeInt, Replay, SampleView


@dataclass(frozen=True, kw_only=True)
class VADER(GradientPath):
    """Gradient of one sampler step, which later steps pass through unchanged.

    `recipe.frames` chooses the decoded frames; VADER decodes a random one. The paper samples with
    stochastic DDIM, but rollouts here are deterministic.

    Source: VADER, arXiv:2407.08737.
    """

    step: Literal["last", "random"] | NonNegativeInt = "last"
    """Step that the gradient reaches: the last, a random one, or a step index."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of one step."""
        last = replay.num_steps - 1
        k = last if self.step == "last" else self.step
        if isinstance(k, str):
            k = draw_int(0, last, generator)
        if k > last:
            raise ValueError(
                f"recipe.gradient_path VADER.step is {k}, but rollouts have {last + 1} steps: give "
                f"at most {last}, or raise recipe.start.num_steps"
            )
        path = euler_sum({k: replay.velocity(k)}, replay.sigmas)
        yield SampleView(straight_through(replay.state(last + 1), path))

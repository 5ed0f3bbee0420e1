"""AlignProp: backpropagation through the sampler, truncated at a random step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from flowalign.gradient_paths.draft import chain_steps
from flowalign.gradient_paths.steps import draw_int
from flowalign.types import GradientPath, PositiveFloat, Replay, SampleView, UnitInterval


@dataclass(frozen=True, kw_only=True)
class AlignProp(GradientPath):
    """Backpropagation through the sampler from a random step to the end.

    The step is given as a share of the rollout, because the published values refer to 50 steps.

    Source: AlignProp, arXiv:2310.03739.
    """

    truncation: Literal["normal", "uniform"] = "normal"
    """Distribution of the first step that the gradient reaches."""
    mean: UnitInterval = 0.84
    """Mean of `normal`, as a share of the steps. Default: 42 of 50."""
    std: PositiveFloat = 0.1
    """Standard deviation of `normal`, as a share of the steps. Default: 5 of 50."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of a chain of random length."""
        num_steps = replay.num_steps
        if self.truncation == "uniform":
            start = draw_int(0, num_steps - 1, generator)
        else:
            share = self.mean + self.std * float(torch.randn((), generator=generator))
            start = min(max(round(share * num_steps), 0), num_steps - 1)
        yield SampleView(chain_steps(replay, start))

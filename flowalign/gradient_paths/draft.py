"""DRaFT-K: backpropagation through the last K steps of the sampler."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.path_gradient import straight_through
from flowalign.gradient_paths.steps import require_steps
from flowalign.types import GradientPath, PositiveInt, Replay, SampleView


@dataclass(frozen=True, kw_only=True)
class DRaFT(GradientPath):
    """Backpropagation through the last `last_steps` steps of the sampler.

    If `last_steps` is the number of steps, this is the gradient of the whole sampler. Memory grows
    linearly with `last_steps`.

    Source: DRaFT-K, arXiv:2309.17400.
    """

    last_steps: PositiveInt = 1
    """K, the number of last steps through which the gradient flows. Default: 1, DRaFT-1."""

    @override
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of its last K steps."""
        require_steps(f"DRaFT.last_steps {self.last_steps}", self.last_steps, replay.num_steps)
        yield SampleView(chain_steps(replay, replay.num_steps - self.last_steps))


def chain_steps(replay: Replay, start: int) -> Float[Tensor, "n *latent"]:
    """Return the sample with the gradient of the chain of all steps from `start` on.

    Every state keeps its value from the rollout.
    """
    x, sigmas = replay.state(start), replay.sigmas
    for k in range(start, replay.num_steps):
        step = x + (sigmas[k + 1] - sigmas[k]) * replay.velocity(k, x)
        x = straight_through(replay.state(k + 1), step)
    return x

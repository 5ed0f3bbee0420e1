"""DRaFT-LV: backpropagation through the last step, also for re-noised copies of the sample."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.path_gradient import predict_clean
from flowalign.types import GradientPath, NonNegativeInt, Replay, SampleView


@dataclass(frozen=True, kw_only=True)
class DRaFTLV(GradientPath):
    """Backpropagation through the last step, for the sample and for re-noised copies of it.

    Several gradients per rollout lower the variance.

    Source: DRaFT-LV, arXiv:2309.17400.
    """

    noised_copies: NonNegativeInt = 2
    """Number of copies of each sample that are noised to the last noise level and denoised."""

    @override
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample, then its copies."""
        k = replay.num_steps - 1
        sigma = replay.sigmas[k]
        first = predict_clean(replay.state(k), replay.velocity(k), sigma)
        yield SampleView(first)
        sample = first.detach()
        for i in range(self.noised_copies):
            x = add_noise(sample, replay.noise(i), sigma.expand(len(sample)))
            yield SampleView(predict_clean(x, replay.velocity_at(x, sigma), sigma))

"""DRaFT-LV: the last step, with further gradients from the sample noised again."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from flowalign.functional.connection import predicted_clean
from flowalign.functional.matching import noised
from flowalign.types import Connected, Connection, NonNegativeInt, Replay


@dataclass(frozen=True, kw_only=True)
class DRaFTLV(Connection):
    """Scores the sample, connected to its last step, and copies of it that this step denoised anew.

    More gradients for one rollout lower the variance.

    Source: DRaFT-LV, arXiv:2309.17400.
    """

    noised_copies: NonNegativeInt = 2
    """Copies of each sample that are noised to the last step's level and denoised by it."""

    @override
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[Connected]:
        """Yield the sample, and then its copies."""
        k = replay.num_steps - 1
        sigma = replay.sigmas[k]
        first = predicted_clean(replay.state(k), replay.velocity(k), sigma)
        yield Connected(first)
        sample = first.detach()
        for i in range(self.noised_copies):
            x = noised(sample, replay.noise(i), sigma.expand(len(sample)))
            yield Connected(predicted_clean(x, replay.velocity_at(x, sigma), sigma))

"""Add noise to clean latents, for rewards of noisy latents.

The candidates of a record share noise and noise level.
Source: Flow-NRG, arXiv:2501.13918, trains on pairs with shared noise and level; so do DiNa-LRM,
arXiv:2602.11146, and PRFL, arXiv:2511.21541.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from flowalign.functional.rating import Features
from flowalign.reward_training.labels import Preferences
from flowalign.training.matching.times import Times
from flowalign.types import NoisyBackbone
from flowalign.utils.seeds import generator

_RECORDS_AT_ONCE = 256


@dataclass(frozen=True)
class NoisedFeatures:
    """Features of clean latents at randomly drawn noise levels."""

    backbone: NoisyBackbone
    clean: Features
    """Clean latents and conditioning of all samples."""
    preferences: Preferences
    """Records; the candidates of each share noise and level."""
    times: Times
    """Distribution of the noise levels."""
    seed: int

    def draw(self, samples: Int[Tensor, "k"], update: int) -> Features:
        """Return features of `samples` with the noise of an update."""
        return self._add_noise(samples, generator(self.seed, "noise", update))

    def draw_held_out(self) -> Features:
        """Return features of all samples, with one fixed draw of noise per record."""
        drawn, parts = generator(self.seed, "held noise"), []
        record = self._record()
        for some in torch.arange(len(self.preferences.candidate)).split(_RECORDS_AT_ONCE):
            samples = ((record >= some[0]) & (record <= some[-1])).nonzero().flatten()
            parts.append(self._add_noise(samples, drawn))
        joint = torch.cat([part.joint for part in parts])
        return Features(joint, torch.cat([part.prompt for part in parts]))

    def _add_noise(self, samples: Int[Tensor, "k"], drawn: torch.Generator) -> Features:
        records, place = self._record()[samples].unique(return_inverse=True)
        sigma = self.times.draw(len(records), self.backbone.policy, drawn)
        noise = torch.randn(len(records), self.clean.joint.shape[1], generator=drawn)
        clean = self.clean.take(samples)
        return self.backbone.add_noise(clean, sigma[place], noise[place]).to(torch.device("cpu"))

    def _record(self) -> Int[Tensor, "n"]:
        """Return the record of each sample; samples are in the order of the records."""
        return (self.preferences.candidate >= 0).nonzero()[:, 0]

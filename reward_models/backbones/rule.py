"""Implements the base class of rewards that score each sample by a rule, without a gradient."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec

Verdict = (
    tuple[Sequence[float], Mapping[str, Any]] | tuple[Sequence[float], Mapping[str, Any], Tensor]
)
"""Score of every dimension, further results for the extras and, if the spec has maps, a map."""


class Unscorable(Exception):
    """Raised if a rule cannot score a sample; its text becomes the sample's reason."""


class RuleReward(RewardModel):
    """Reward that scores each sample separately by a rule, which a subclass defines."""

    spec: RewardSpec

    @abstractmethod
    def judge(self, sample: MediaBatch) -> Verdict:
        """Score a batch of one that passed the screen; raise Unscorable if the rule cannot."""

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score every sample that can be scored."""
        failed = self.spec.screen(batch)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        places = torch.full((len(batch), *batch.media.shape[-2:]), torch.nan)
        for i in range(len(batch)):
            if i in failed:
                continue
            try:
                scores, extras[i], *place = self.judge(batch.take([i]))
                values[i] = torch.tensor(scores)
                places[i : i + 1] = place[0] if place else torch.nan
            except Unscorable as reason:
                failed[i] = str(reason)
        painted = places if self.spec.maps else None
        return RewardOutput.build(self.spec, values, failed, extras=extras, places=painted)


def metadata_of(sample: MediaBatch) -> Mapping[str, Any]:
    """Return the metadata of a batch of one."""
    return sample.metadata[0] if sample.metadata else {}


def to_uint8(frames: Float[Tensor, "n 3 h w"]) -> UInt8[np.ndarray, "n h w 3"]:
    """Convert images in [0, 1] to 8-bit RGB arrays for image libraries."""
    levels = (frames.detach().float().cpu() * 255).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()

"""Implements VBench's consistency over time: flicker of pixels, and change of frame features.

Both scores are best for a still video, so combine them with a reward of motion.

Source: Vchitect/VBench @ 45e79ec14e, temporal_flickering.py and subject_consistency.py.
"""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import MediaBatch, PositiveInt, RewardModel, RewardOutput, RewardSpec
from reward_models.backbones.backbones import Encoder
from reward_models.backbones.encoded import EncoderReward

_AT_ONCE = 64
"""Number of frames that are encoded together."""


def flicker(media: Float[Tensor, "n F 3 h w"]) -> Float[Tensor, "n"]:
    """Return 1 minus the mean absolute difference of neighbouring frames; 1 for a still video."""
    steps = pairwise(media.float().unbind(1))  # one pair at a time fits the CPU cache
    return 1 - torch.stack([(b - a).abs().flatten(1).mean(1) for a, b in steps]).mean(0)


def consistency(features: Float[Tensor, "n F D"]) -> Float[Tensor, "n"]:
    """Return the mean cosine of each later frame to the previous and to the first frame, half each.

    Negative cosines count as 0.
    """
    features = F.normalize(features.float(), dim=-1)
    later = features[:, 1:]
    before = (later * features[:, :-1]).sum(-1).clamp(min=0)
    start = (later * features[:, :1]).sum(-1).clamp(min=0)
    return ((before + start) / 2).mean(1)


class TemporalFlicker(RewardModel):
    """Scores flicker in [0, 1], 1 for a video without any change; intended for static scenes."""

    def __init__(self) -> None:
        self.spec = RewardSpec(
            name="temporal_flicker",
            dims=("flicker",),
            modality="video",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            differentiable=True,
        )

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score all samples at once; a failed row has no gradient."""
        failed = self.spec.screen(batch)
        values = torch.full((len(batch), 1), torch.nan)
        good = [i for i in range(len(batch)) if i not in failed]
        if good:
            scores = flicker(batch.take(good).media)
            values = values.index_put((torch.tensor(good),), scores[:, None].cpu())
        return RewardOutput.build(self.spec, values, failed)


class SubjectConsistency(EncoderReward):
    """Scores the similarity of every frame to the previous and to the first frame, in [0, 1].

    The formula is VBench's, with any image encoder. VBench itself uses DINO ViT-B/16 for the
    subject and CLIP for the background, so scores are comparable only for the same encoder.
    """

    def __init__(
        self,
        encoder: Encoder | None = None,
        device: str = "auto",
        batch_size: PositiveInt = 4,
        offload: bool = False,
    ):
        spec = RewardSpec(
            name="subject_consistency",
            dims=("consistency",),
            modality="video",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            differentiable=True,
        )
        super().__init__(spec, encoder, device, batch_size, offload)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Embed every frame and compare the embeddings."""
        frames = batch.media.flatten(0, 1).split(_AT_ONCE)
        features = torch.cat([self.features(some) for some in frames])
        return consistency(features.unflatten(0, batch.media.shape[:2]))[:, None]

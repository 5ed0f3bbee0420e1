"""Measures how well an edit preserves its source: pixels outside the mask, and image features.

Both scores are best for an unedited image, so combine them with a reward of the edit.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import MediaBatch, RewardSpec
from reward_models.backbones.encoders import EncoderReward
from reward_models.backbones.pixels import resize
from reward_models.backbones.reward_bases import BatchScores, ScreenedReward


def compare_pixels(
    edit: Float[Tensor, "3 h w"],
    source: Float[Tensor, "3 h w"],
    mask: Float[Tensor, "1 h w"] | None = None,
) -> Float[Tensor, ""]:
    """Return 1 minus the mean absolute difference of the pixels, weighted by 1 - mask.

    It is NaN if the mask covers everything.
    """
    weight = 1 - mask if mask is not None else torch.ones_like(edit[:1])
    return 1 - ((edit - source).abs().mean(0) * weight[0]).sum() / weight.sum()


class UnchangedPixels(ScreenedReward):
    """Scores in [0, 1] how little an edit changed its source; 1 means no change.

    If a sample has a mask, only pixels outside the mask count. Source and mask are resized to the
    edit.
    """

    spec = RewardSpec(
        name="unchanged_pixels",
        dims=("unchanged_pixels",),
        modality="image",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        differentiable=True,
        needs=("references",),
    )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Compare every edit with its own source."""
        values = torch.stack([_compare_to_source(batch.take([i])) for i in range(len(batch))])
        covered = (~values.isfinite()).nonzero()[:, 0].tolist()
        return BatchScores(
            values[:, None], failed=dict.fromkeys(covered, "its mask covers the whole image")
        )


def _compare_to_source(sample: MediaBatch) -> Float[Tensor, ""]:
    edit = sample.media[0, 0].float().cpu()
    height, width = edit.shape[1:]
    source = resize(sample.references[0][0][None].float().cpu(), height, width)[0].clamp(0, 1)
    mask = sample.masks[0] if sample.masks else None
    if mask is not None:
        whole = mask[None].float().cpu()
        mask = F.interpolate(whole, (height, width), mode="bilinear", antialias=True)[0]
    return compare_pixels(edit, source, mask)


@dataclass(eq=False, repr=False)
class SourceConsistency(EncoderReward):
    """Scores the cosine of the features of edit and source, in [0, 1]; negative cosines count as 0.

    Any image encoder can be used, such as a CLIP of `reward_models.backbones`. Scores are
    comparable only for the same encoder.
    """

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="source_consistency",
            dims=("source_consistency",),
            modality="image",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            differentiable=True,
            needs=("references",),
        )

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Embed every edit and its source, which may differ in size."""
        edits = self.features(batch.media[:, 0])
        sources = torch.cat([self._embedded(some[0]) for some in batch.references])
        return F.cosine_similarity(edits, sources).clamp(min=0)[:, None]

    @torch.no_grad()
    def _embedded(self, source: Float[Tensor, "3 h w"]) -> Float[Tensor, "1 D"]:
        return self.features(source[None])

"""Measures how clearly images show the subjects of their references, and where.

Source: FocusDPO, arXiv:2509.01181, a reconstruction: see `flowalign.functional.resizing`. Patches
are image windows that any image encoder embeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from flowalign.functional.resizing import complexity, correspondence, focus
from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.encoders import EncoderReward
from reward_models.backbones.reward_bases import BatchScores

_PIXELS = 64
"""Side of a patch that the encoder receives, in pixels."""


@dataclass(eq=False, repr=False)
class SubjectFocus(EncoderReward):
    """Scores the mean correspondence to the references, in [0, 1]; the map is the focus of patches.

    An image has `grid` x `grid` patches, each twice as wide as their distance. Every patch is
    compared with the patches of all references of its request. The score averages the half of the
    patches with the best correspondence, because a subject need not fill the image.
    """

    grid: PositiveInt = 8
    batch_size: PositiveInt = field(default=8, kw_only=True)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="subject_focus",
            dims=("subject",),
            modality="image",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            needs=("references",),
            normalisation=f"grid {self.grid}",
            maps=True,
        )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Compare the patches of every image with the patches of its references."""
        found = [
            self._focus(picture[0], references)
            for picture, references in zip(batch.media, batch.references, strict=True)
        ]
        matches, places = (torch.stack(part).cpu() for part in zip(*found, strict=True))
        best = matches.sort(1, descending=True).values[:, : (self.grid**2 + 1) // 2]
        return BatchScores(
            best.mean(1, keepdim=True), places=places.unflatten(1, (self.grid, self.grid))
        )

    def _focus(self, picture: Tensor, references: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        shown = torch.cat([cut_windows(reference, self.grid) for reference in references])
        match, which = correspondence(
            self.features(cut_windows(picture, self.grid)), self.features(shown)
        )
        return match, focus(match, which, complexity(shown).to(match.device))


def cut_windows(picture: Float[Tensor, "3 h w"], grid: int) -> Float[Tensor, "p 3 q q"]:
    """Cut grid x grid patches that overlap by half, row by row, with sides of `_PIXELS`.

    The image is first resized, so that images of all sizes give comparable patches.
    """
    side, step = _PIXELS, _PIXELS // 2
    size = (grid + 1) * step
    resized = interpolate(picture[None].float(), (size, size), mode="bilinear", antialias=True)
    cut = resized[0].unfold(1, side, step).unfold(2, side, step)  # 3 grid grid side side
    return cut.permute(1, 2, 0, 3, 4).flatten(0, 1)

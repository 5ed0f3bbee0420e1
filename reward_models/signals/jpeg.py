"""Implements JPEG size: two rewards without a model, useful to test reinforcement learning.

Source: DDPO, arXiv:2305.13301v4, compressibility and incompressibility.
"""

from io import BytesIO
from statistics import fmean
from typing import Annotated, Literal

from PIL import Image

from flowalign.types import MediaBatch, Range, RewardSpec
from reward_models.backbones.reward_bases import RuleReward, Verdict, to_uint8

Dim = Literal["compressibility", "incompressibility"]
SIGN: dict[str, int] = {"compressibility": -1, "incompressibility": 1}


class JpegSize(RuleReward):
    """Scores the image's size as JPEG in kB (1000 bytes), negative for `compressibility`.

    A video scores the mean over its frames. Chroma is subsampled, as in Pillow's default.
    """

    def __init__(
        self, dim: Dim = "compressibility", quality: Annotated[int, Range(least=1, most=100)] = 95
    ):
        self.sign, self.quality = SIGN[dim], quality
        self.spec = RewardSpec(
            name="jpeg",
            dims=(dim,),
            scale=(0.0, float("inf")) if self.sign > 0 else (-float("inf"), 0.0),
            licence="Apache-2.0",
            version=f"quality {quality}, 4:2:0",
        )

    def judge(self, sample: MediaBatch) -> Verdict:
        """Encode every frame and average the sizes."""
        sizes = [self._kilobytes(Image.fromarray(f)) for f in to_uint8(sample.media[0])]
        return (self.sign * fmean(sizes),), {}

    def _kilobytes(self, picture: Image.Image) -> float:
        buffer = BytesIO()
        picture.save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell() / 1000

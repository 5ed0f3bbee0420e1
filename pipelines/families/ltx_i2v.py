"""Wraps LTX-Video image-to-video as a flowalign policy: a request has its first frame."""

from collections.abc import Sequence

from diffusers import LTXImageToVideoPipeline
from torch import Tensor

from flowalign.types import Cond, InputSpec, Request
from pipelines.families.first_frame import (
    encode_first_frames,
    insert_first_frame,
    lead_to_first_frame,
    mask_first_times,
)
from pipelines.families.ltx import LTX


class LTXI2V(LTX):
    """Wraps an `LTXImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The single reference of a request is the first frame. It replaces the first latent frame, at
    time 0, see `first_frame`. The pipeline samples its latents from the encoder's distribution;
    this policy uses the mode. In all other respects the class equals `LTX`.
    """

    pipeline_class = LTXImageToVideoPipeline
    input_spec = InputSpec(references=(1, 1), kind="first_frame")

    def encode(self, requests: Sequence[Request]) -> Cond:
        return {**super().encode(requests), "first": encode_first_frames(self, requests)}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        first = cond["first"]
        return lead_to_first_frame(
            super().velocity(insert_first_frame(x, first), sigma, cond), x, sigma, first
        )

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        tokens = x[0, 0].numel()
        return mask_first_times(super().times(x, sigma), tokens, x.shape[2])

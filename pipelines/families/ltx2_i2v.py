"""Wraps LTX-2 image-to-video with sound as a flowalign policy: a request has its first frame."""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
from PIL import Image
from torch import Tensor

from flowalign.types import Cond, InputSpec, Request
from flowalign.utils.imports import LazyModule
from pipelines.families.first_frame import (
    encode_first_frames,
    insert_first_frame,
    lead_to_first_frame,
    mask_first_times,
)
from pipelines.families.ltx2 import LTX2
from pipelines.parts.folder import Config

_utils = LazyModule("diffusers.pipelines.ltx2.utils")


class LTX2I2V(LTX2):
    """Wraps an `LTX2ImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The single reference of a request is the first frame. It replaces the first latent frame of the
    video, at time 0, see `first_frame`; all of the audio is denoised. As in the pipeline, the frame
    is compressed like the frames of clips that the model was trained on.
    """

    pipeline_class = "LTX2ImageToVideoPipeline"
    input_spec = InputSpec(references=(1, 1), kind="first_frame")

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        if find_spec("av") is None:
            raise ValueError(
                "first frames of LTX-2 need av: pip install 'flowalign-diffusion[video]'"
            )
        return super().shape_of_latents(transformer, vae)

    def encode(self, requests: Sequence[Request]) -> Cond:
        return {
            **super().encode(requests),
            "first": encode_first_frames(self, requests, self._compress),
        }

    def _compress(self, frame: Image.Image) -> Image.Image:
        crf = _utils.resolve_default_image_crf(self.pipe.text_encoder)
        return Image.fromarray(_utils.apply_image_conditioning_crf(np.array(frame), crf))

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        parts, first = self.state_parts, cond["first"]
        video, audio = parts.split(x)
        v, v_audio = parts.split(
            super().velocity(parts.joined(insert_first_frame(video, first), audio), sigma, cond)
        )
        return parts.joined(lead_to_first_frame(v, video, sigma, first), v_audio)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        return mask_first_times(super().times(x, sigma), x[0, 0].numel(), x.shape[2])

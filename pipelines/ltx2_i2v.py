"""Wraps LTX-2 image-to-video with sound as a flowalign policy: requests come with a first frame."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from diffusers import LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
from PIL import Image
from torch import Tensor

from flowalign.types import Cond, Request, Takes
from pipelines.first_frame import encoded, led, shown, times_of_others
from pipelines.ltx2 import LTX2


class LTX2I2V(LTX2):
    """Wraps an `LTX2ImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The one reference of a request is the first frame, see `pipelines.first_frame`: it stands in
    place of the first latent frame of the video, at time 0, and audio is denoised whole. As in the
    pipeline, the frame is compressed like the frames of clips that the model was trained on.
    """

    pipeline_class = LTX2ImageToVideoPipeline
    takes = Takes(references=(1, 1), kind="first_frame")

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        if find_spec("av") is None:
            raise ValueError("first frames of LTX-2 need av: pip install 'flowalign[video]'")
        return super().shape_of_latents(transformer, vae)

    def encode(self, requests: Sequence[Request]) -> Cond:
        return {**super().encode(requests), "first": encoded(self, requests, self._compressed)}

    def _compressed(self, frame: Image.Image) -> Image.Image:
        crf = resolve_default_image_crf(self.pipe.text_encoder)
        return Image.fromarray(apply_image_conditioning_crf(np.array(frame), crf))

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        parts, first = self.state_parts, cond["first"]
        video, audio = parts.split(x)
        v, v_audio = parts.split(
            super().velocity(parts.joined(shown(video, first), audio), sigma, cond)
        )
        return parts.joined(led(v, video, sigma, first), v_audio)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        return times_of_others(super().times(x, sigma), x[0, 0].numel(), x.shape[2])

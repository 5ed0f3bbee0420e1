"""Wraps HunyuanVideo 1.5 image-to-video as a flowalign policy: a request has its first frame."""

from collections.abc import Sequence

import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from torch import Tensor

from flowalign.types import Cond, InputSpec, Request
from pipelines.families.hunyuan15 import HunyuanVideo15
from pipelines.network.weights import DTYPES
from pipelines.parts.references import crop_first_frames


class HunyuanVideo15I2V(HunyuanVideo15):
    """Wraps a `HunyuanVideo15ImageToVideoPipeline` folder or hub identifier as a policy.

    The one reference of a request is the first frame. It is cropped around its centre to the aspect
    ratio of the video, and resized to it; the pipeline itself takes the nearest size of its
    buckets. Every latent frame is denoised, the first as well: the network sees the given one
    beside the state. `cond` holds, beside the text, "first": latents of the frame, and "features"
    of it. Everything else is the same as for `HunyuanVideo15`.
    """

    pipeline_class = HunyuanVideo15ImageToVideoPipeline
    input_spec = InputSpec(references=(1, 1), kind="first_frame")

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        cond = super().encode(requests)
        frames, rows = crop_first_frames(requests, self.width / self.height)
        processor, device = self.pipe.video_processor, self.pipe.vae.device
        size = {"height": self.height, "width": self.width}
        sized = [processor.resize(one, **size, resize_mode="crop") for one in frames]
        pixels = [processor.preprocess(one, **size)[:, :, None].to(device) for one in sized]
        dtype = DTYPES[self.precision]
        with self.text_encoder.on_device():
            features = [self.pipe.encode_image(one, 1, device, dtype) for one in sized]
        first = torch.cat([self.codec.encode(one) for one in pixels])
        return {**cond, "first": first[rows], "features": torch.cat(features)[rows]}

    def first_frame(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        frame, _ = super().first_frame(x, cond)
        frame[:, :-1, :1], frame[:, -1:, :1] = cond["first"], 1.0
        return frame, cond["features"]

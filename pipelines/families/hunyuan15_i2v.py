"""Wraps HunyuanVideo 1.5 image-to-video as a flowalign policy: a request has its first frame."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.types import Cond, InputSpec, Request
from pipelines.families.hunyuan15 import HunyuanVideo15
from pipelines.network.weights import DTYPES
from pipelines.parts.references import crop_first_frames


class HunyuanVideo15I2V(HunyuanVideo15):
    """Wraps a `HunyuanVideo15ImageToVideoPipeline` folder or hub identifier as a policy.

    The single reference of a request is the first frame. It is centre-cropped to the aspect ratio
    of the video and resized to its size; the pipeline itself uses the nearest size of its buckets.
    All latent frames are denoised, including the first, and the network receives the given frame in
    addition to the state. In addition to the text, `cond` holds "first", the latents of the frame,
    and its "features". In all other respects the class equals `HunyuanVideo15`.
    """

    pipeline_class = "HunyuanVideo15ImageToVideoPipeline"
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

"""Wraps Wan 2.1 image-to-video as a flowalign policy: every request comes with its first frame."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from flowalign.types import Cond, Request, Takes
from pipelines.first_frame import with_image_encoder
from pipelines.references import first_frames
from pipelines.wan import Wan

_TEXT = 512
"""Number of text tokens beside the image tokens, hard-coded in diffusers' network."""


class WanI2V(Wan):
    """Wraps a `WanImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The one reference of a request is the first frame. It is cropped around its centre to the aspect
    ratio of the video, then treated like in the pipeline.

    `cond` holds, beside the text, "image": the first frame's mask and latents, which the network
    sees with the state, and, for a network that takes them, "clip": features of the image. Such a
    network needs prompts of 512 tokens.
    """

    pipeline_class = WanImageToVideoPipeline
    takes = Takes(references=(1, 1), kind="first_frame")

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        if transformer["added_kv_proj_dim"] is not None and self.max_sequence_length != _TEXT:
            raise ValueError(
                f"max_sequence_length is {self.max_sequence_length}; the network of {self.path} "
                f"takes the last {_TEXT} tokens for the prompt and those before for the picture: "
                f"give {_TEXT}"
            )
        return super().shape_of_latents(transformer, vae)

    def condition_channels(self, vae: Mapping[str, Any]) -> int:
        return vae["scale_factor_temporal"] + vae["z_dim"]

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        cond = dict(super().encode(requests))
        frames, rows = first_frames(requests, self.width / self.height)
        cond["image"] = torch.cat([self._first_frame(frame) for frame in frames])[rows]
        if self.pipe.components[self.part].config.image_dim is not None:
            cond["clip"] = self._features(frames).to(cond["text"].dtype)[rows]
        return cond

    def _first_frame(self, frame: Image.Image) -> Tensor:
        """Return mask and latents of a clip whose first frame is `frame`, the rest grey."""
        device = self.denoiser.device
        pixels = self.pipe.video_processor.preprocess(frame, self.height, self.width).to(device)
        clip = torch.zeros(1, 3, self.video.num_frames, self.height, self.width, device=device)
        clip[:, :, 0] = pixels
        latents = self.latents(clip)
        known = latents.new_zeros(1, self.pipe.vae_scale_factor_temporal, *latents.shape[2:])
        known[:, :, 0] = 1
        return torch.cat([known, latents], 1)

    def _features(self, frames: Sequence[Image.Image]) -> Tensor:
        device = self.denoiser.device
        with self.text_encoders():
            return torch.cat([self.pipe.encode_image(frame, device) for frame in frames])

    def answer(self, x: Tensor, time: Tensor, cond: Cond, text: str) -> Tensor:
        return self.call_denoiser(
            torch.cat([x, cond["image"]], 1),
            timestep=time,
            encoder_hidden_states=cond[text],
            encoder_hidden_states_image=cond.get("clip"),
        )

    def encoders(self) -> tuple[str, str]:
        media, text = super().encoders()
        return media, with_image_encoder(self, text)

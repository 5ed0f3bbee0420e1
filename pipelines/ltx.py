"""Wraps LTX-Video (text to video) as a flowalign policy."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from diffusers import LTXPipeline, LTXVideoTransformer3DModel
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import Precision
from pipelines.framewise import windows
from pipelines.schedules import sized_sigmas
from pipelines.video import Memory, Video, VideoPolicy
from pipelines.weights import Lora

LORA = Lora(target_modules=("to_q", "to_k", "to_v", "to_out.0"))
"""Default adapter: on self- and cross-attention of every block.

A run file that gives some fields of `lora` gets the others from `Lora`, not from here.
"""

DECODE_TIME, DECODE_NOISE = 0.05, 0.025
"""Timestep input and noise share for a decoder that performs the last denoising step itself.

Source: diffusers' guide to LTX-Video, for 0.9.1 and later.
"""


class LTX(VideoPolicy):
    """Wraps an `LTXPipeline` folder or hub identifier as a text-to-video policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each; it is not
    rescaled, which is the pipeline's default. The frame rate is an input of the network. A decoder
    conditioned on a timestep (0.9.1 and later) adds noise; each sample always gets the same noise.

    `memory.decode_frames` bounds the latent frames decoded together to that number plus one; these
    windows are blended where they overlap. Without it the clip is decoded at once, like the
    pipeline does.
    """

    pipeline_class = LTXPipeline
    transformer_class = LTXVideoTransformer3DModel

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance = 3.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 128,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, lora, precision, memory)
        self.guidance, self.max_sequence_length = guidance, max_sequence_length
        self.evaluations_per_velocity = 2 if guidance > 1 else 1

    def latent_unit(self, vae: Mapping[str, Any]) -> tuple[int, int, int]:
        halved = 2 ** sum(vae["spatio_temporal_scaling"])
        frames = vae.get("temporal_compression_ratio") or vae["patch_size_t"] * halved
        pixels = vae.get("spatial_compression_ratio") or vae["patch_size"] * halved
        return vae["latent_channels"], frames, pixels

    def patch(self, transformer: Mapping[str, Any]) -> tuple[int, int, int]:
        size = transformer["patch_size"]
        return transformer["patch_size_t"], size, size

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        return vae.latents_mean, vae.latents_std / vae.config.scaling_factor

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        channels, *grid = super().shape_of_latents(transformer, vae)
        self.grid = tuple(grid)
        return channels, *grid

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return sized_sigmas(scheduler, prod(self.grid), num_steps)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        guided = self.guidance > 1
        with self.text_encoders():
            text, mask, text_neg, mask_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                None,
                guided,
                max_sequence_length=self.max_sequence_length,
                device=self.denoiser.device,
            )
        cond = {"text": text, "mask": mask}
        return cond | {"text_neg": text_neg, "mask_neg": mask_neg} if guided else cond

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        time = self.times(x, sigma)
        if self.guidance <= 1:
            return self._unguided(x, time, cond["text"], cond["mask"])
        text = torch.cat([cond["text_neg"], cond["text"]])
        mask = torch.cat([cond["mask_neg"], cond["mask"]])
        v_neg, v = self._unguided(torch.cat([x, x]), torch.cat([time, time]), text, mask).chunk(2)
        return v_neg + self.guidance * (v - v_neg)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the network's timestep input: [n], or [n, tokens] with one per token."""
        return 1000 * sigma.expand(len(x))

    def _unguided(self, x: Tensor, time: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        frames, height, width = self.grid
        seconds = self.pipe.vae_temporal_compression_ratio / self.video.fps
        pixels = self.pipe.vae_spatial_compression_ratio
        v = self.call_denoiser(
            x.flatten(2).mT,
            timestep=time,
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(seconds, pixels, pixels),
        )
        return v.mT.unflatten(2, self.grid)

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        vae, time = self.pipe.vae, None
        if vae.config.timestep_conditioning:
            noise = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(0))
            z = (1 - DECODE_NOISE) * z + DECODE_NOISE * noise.to(z)
            time = z.new_full((len(z),), DECODE_TIME)
        size = self.memory.decode_frames or z.shape[2]
        decode = partial(_decoded, vae, time)
        return windows(decode, z, size, self.pipe.vae_temporal_compression_ratio)


def _decoded(vae: Any, time: Tensor | None, z: Tensor) -> Tensor:
    return vae.decode(z, time, return_dict=False)[0]

"""Wraps LTX-Video (text to video) as a flowalign policy."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from diffusers import LTXPipeline, LTXVideoTransformer3DModel
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import Precision
from pipelines.framewise import windows
from pipelines.guidance import guided, with_negatives
from pipelines.schedules import sized_sigmas
from pipelines.video import Memory, Video, VideoPolicy
from pipelines.weights import ATTENTION, Lora

LORA = Lora(target_modules=ATTENTION)
"""Default adapter: on self- and cross-attention of every block."""
DECODE_TIME, DECODE_NOISE = 0.05, 0.025
"""Timestep input and noise share of decoders with the last step (diffusers' guide, from 0.9.1)."""


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
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)

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
        with self.text_encoders():
            text, mask, text_neg, mask_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                None,
                self.guidance > 1,
                max_sequence_length=self.max_sequence_length,
                device=self.denoiser.device,
            )
        negative = {"text": text_neg, "mask": mask_neg}
        return with_negatives({"text": text, "mask": mask}, negative, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guided(self._unguided, x, self.times(x, sigma), cond, self.guidance)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the network's timestep input: [n], or [n, tokens] with one per token."""
        return 1000 * sigma.expand(len(x))

    def _unguided(self, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
        frames, height, width = self.grid
        seconds = self.pipe.vae_temporal_compression_ratio / self.video.fps
        pixels = self.pipe.vae_spatial_compression_ratio
        v = self.call_denoiser(
            x.flatten(2).mT,
            timestep=time,
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
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
        unit = self.pipe.vae_temporal_compression_ratio
        return windows(lambda part: vae.decode(part, time, return_dict=False)[0], z, size, unit)

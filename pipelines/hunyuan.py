"""Wraps HunyuanVideo (text to video) as a flowalign policy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import DTYPES, Precision
from pipelines.framewise import windows
from pipelines.video import Memory, Video, VideoPolicy
from pipelines.weights import Lora


class HunyuanVideo(VideoPolicy):
    """Wraps a `HunyuanVideoPipeline` folder or hub identifier as a text-to-video policy.

    `embedded_guidance` is an input of the network, which was distilled to imitate that guidance
    scale; a model without the input takes None. `guidance` above 1 adds true classifier-free
    guidance away from the empty prompt, at two evaluations per velocity. Prompts are placed in the
    pipeline's own template.

    The pipeline decodes windows of 5 latent frames and blends them where they overlap;
    `memory.decode_frames` sets another size, and windows hold one latent frame more than that.
    """

    pipeline_class = HunyuanVideoPipeline
    transformer_class = HunyuanVideoTransformer3DModel
    joint_text = True

    def __init__(
        self,
        path: str,
        video: Video,
        embedded_guidance: Guidance | None = 6.0,
        guidance: Guidance = 1.0,
        lora: Lora | None = Lora(),  # noqa: B008 (frozen)
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 256,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, lora, precision, memory)
        self.embedded_guidance, self.guidance = embedded_guidance, guidance
        self.max_sequence_length = max_sequence_length
        self.evaluations_per_velocity = 2 if guidance > 1 else 1

    def latent_unit(self, vae: Mapping[str, Any]) -> tuple[int, int, int]:
        return (
            vae["latent_channels"],
            vae["temporal_compression_ratio"],
            vae["spatial_compression_ratio"],
        )

    def patch(self, transformer: Mapping[str, Any]) -> tuple[int, int, int]:
        size = transformer["patch_size"]
        return transformer["patch_size_t"], size, size

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.tensor([1 / vae.config.scaling_factor])

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        if transformer["guidance_embeds"] == (self.embedded_guidance is None):
            wanted = "a number" if transformer["guidance_embeds"] else "None"
            raise ValueError(
                f"embedded_guidance is {self.embedded_guidance}; {self.path} needs {wanted}"
            )
        return super().shape_of_latents(transformer, vae)

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, num_steps + 1)[:-1])
        return scheduler.sigmas.clone()

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoders():
            cond = self._read(prompts_of(requests))
            if self.guidance <= 1:
                return cond
            empty = self._read([""] * len(requests))
        return cond | {f"{name}_neg": value for name, value in empty.items()}

    def _read(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        text, pooled, mask = self.pipe.encode_prompt(
            list(prompts),
            device=self.denoiser.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": text, "pooled": pooled, "mask": mask}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        sigma = sigma.expand(len(x))
        plain = {name: value for name, value in cond.items() if not name.endswith("_neg")}
        if self.guidance <= 1:
            return self._unguided(x, sigma, plain)
        both = {n: torch.cat([cond[f"{n}_neg"], value]) for n, value in plain.items()}
        v_neg, v = self._unguided(torch.cat([x, x]), sigma.repeat(2), both).chunk(2)
        return v_neg + self.guidance * (v - v_neg)

    def _unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        guidance, dtype = self.embedded_guidance, DTYPES[self.precision]
        if guidance is not None:  # rounded like in the pipeline, and so is the time
            guidance = 1000 * torch.full((len(x),), guidance, dtype=dtype, device=x.device)
        return self.call_denoiser(
            x,
            timestep=(1000 * sigma).to(dtype),
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
            pooled_projections=cond["pooled"],
            guidance=guidance,
        )

    def set_up(self, vae: Any) -> None:
        super().set_up(vae)
        vae.use_framewise_decoding = self.memory.decode_frames is None

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        vae = self.pipe.vae
        size = self.memory.decode_frames or z.shape[2]
        return windows(lambda z: vae.decode(z).sample, z, size, vae.temporal_compression_ratio)

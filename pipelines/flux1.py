"""Wraps FLUX.1 as a flowalign policy: dev, with distilled guidance, and schnell, without."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import DTYPES, DiffusersPolicy, Precision
from pipelines.weights import Lora

LORA = Lora(
    rank=64,
    alpha=128,
    target_modules=(
        *Lora().target_modules,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ),
)
"""Default adapter, from Flow-GRPO's FLUX.1 script; single-stream blocks get it on attention only.

A run file that gives some fields of `lora` gets the others from `Lora`, not from here.
"""


class Flux1(DiffusersPolicy):
    """Wraps a `FluxPipeline` folder or hub identifier as a text-to-image policy.

    `embedded_guidance` is an input of the network, which was distilled to imitate that guidance
    scale: one evaluation per velocity. A model without the input (schnell) takes None.

    States are latents of the autoencoder's shape, equal to what the pipeline draws from a seed;
    they are packed into tokens of 2 x 2 only for the network.
    """

    pipeline_class = FluxPipeline
    transformer_class = FluxTransformer2DModel
    evaluations_per_velocity = 1

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        embedded_guidance: Guidance | None = 3.5,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        super().__init__(path, lora, precision, gradient_checkpointing)
        self.height, self.width, self.embedded_guidance = height, width, embedded_guidance
        self.max_sequence_length = max_sequence_length

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        patch = 2 ** len(vae["block_out_channels"])  # pixels along a side of a token
        if self.height % patch or self.width % patch:
            raise ValueError(
                f"size {self.width}x{self.height}: both sides must be multiples of {patch} "
                f"for {self.path}"
            )
        if transformer["guidance_embeds"] == (self.embedded_guidance is None):
            wanted = "a number" if transformer["guidance_embeds"] else "None"
            raise ValueError(
                f"embedded_guidance is {self.embedded_guidance}; {self.path} needs {wanted}"
            )
        self.grid = self.height // patch, self.width // patch
        return transformer["in_channels"] // 4, 2 * self.grid[0], 2 * self.grid[1]

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:
        return prod(latent_shape) // transformer["in_channels"] + self.max_sequence_length

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        rows, columns = self.grid
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        mu = calculate_shift(rows * columns, *(scheduler.config[name] for name in names))
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
        return scheduler.sigmas.clone()

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        text, pooled, _ = self.pipe.encode_prompt(
            prompts_of(requests),
            None,
            device=self.denoiser.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": text, "pooled": pooled}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        rows, columns = self.grid
        positions = [torch.arange(n, device=x.device) for n in (1, rows, columns)]
        guidance = self.embedded_guidance
        time = (sigma * 1000).to(DTYPES[self.precision]) / 1000  # rounded like in the pipeline
        v = self.call_denoiser(
            pixel_unshuffle(x, 2).flatten(2).mT,
            timestep=time.expand(len(x)),
            guidance=None if guidance is None else x.new_full((len(x),), guidance),
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
            txt_ids=x.new_zeros(cond["text"].shape[1], 3),
            img_ids=torch.cartesian_prod(*positions).to(x.dtype),
        )
        return pixel_shuffle(v.mT.unflatten(2, self.grid), 2)

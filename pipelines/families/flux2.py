"""Wraps FLUX.2 as flowalign policies: dev and klein.

Guidance is an input of the network of dev; the smaller klein has classifier-free guidance.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from flowalign.utils.imports import LazyModule
from pipelines.codec import StandardizedCodec
from pipelines.network.schedules import round_times, shift_sigmas
from pipelines.network.weights import ATTENTION, Lora
from pipelines.parts.evaluation import grid_of, read_with_negatives, token_places
from pipelines.parts.folder import Config
from pipelines.policy import DiffusersPolicy, Precision

_pipeline = LazyModule("diffusers.pipelines.flux2.pipeline_flux2")

LORA = Lora(
    target_modules=(
        *ATTENTION,
        "to_qkv_mlp_proj",
        *(f"single_transformer_blocks.{i}.attn.to_out" for i in range(48)),
    )
)
"""Default adapter: attention of all blocks, as in diffusers' dreambooth."""


class Flux2(DiffusersPolicy):
    """Wraps a `Flux2Pipeline` folder or hub identifier as a text-to-image policy.

    `embedded_guidance` is an input of the network, so a velocity takes one evaluation and no
    negative prompt. Prompts are padded to `max_sequence_length`, and the network attends to the
    padding, so another length changes the model's output. States are patches of 2 x 2 latents,
    normalised by the statistics in the autoencoder's batch norm. The pipeline draws its noise in
    this shape.
    """

    pipeline_class = "Flux2Pipeline"
    transformer_class = "Flux2Transformer2DModel"
    default_lora = LORA
    has_guidance = False
    embedded_guidance: float | None

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        embedded_guidance: Guidance = 4.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        codec = PatchCodec(height, width)
        super().__init__(
            path, codec, lora, precision, 1.0, max_sequence_length, gradient_checkpointing
        )
        self.embedded_guidance = embedded_guidance

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        self.grid = grid_of(self, 2 ** len(vae["block_out_channels"]))
        if transformer["guidance_embeds"] == (self.embedded_guidance is None):
            takes = "takes" if transformer["guidance_embeds"] else "does not take"
            raise ValueError(
                f"the network of {self.path} {takes} guidance as an input:\n"
                "FLUX.2 dev is pipelines.Flux2, FLUX.2-klein pipelines.Flux2Klein"
            )
        return transformer["in_channels"], *self.grid

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:  # noqa: ARG002
        return prod(self.grid) + self.max_sequence_length

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        mu = _pipeline.compute_empirical_mu(prod(self.grid), num_steps)
        return shift_sigmas(scheduler, mu, num_steps)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        return {"text": self.read(prompts_of(requests))}

    def read(self, prompts: list[str]) -> Tensor:
        """Encode prompts, padded to one length."""
        text, _ = self.pipe.encode_prompt(
            prompts, device=self.denoiser.device, max_sequence_length=self.max_sequence_length
        )
        return text

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return self.evaluate(x, sigma, cond["text"])

    def evaluate(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """Evaluate the network with encoded prompts."""
        guidance = self.embedded_guidance
        v = self.call_denoiser(
            x.flatten(2).mT,
            timestep=round_times(sigma, len(x), self.precision),
            guidance=None if guidance is None else x.new_full((len(x),), guidance),
            encoder_hidden_states=text,
            txt_ids=token_places((1, 1, 1, text.shape[1]), x),
            img_ids=token_places((1, *self.grid, 1), x),
        )
        return v.mT.unflatten(2, self.grid)


class PatchCodec(StandardizedCodec):
    """Encodes images to patches of 2 x 2 latents, normalised by the VAE's batch norm."""

    def normalize(self, z: Tensor) -> Tensor:
        return super().normalize(pixel_unshuffle(z, 2))

    def denormalize(self, x: Tensor) -> Tensor:
        return pixel_shuffle(super().denormalize(x), 2)

    def statistics(self) -> tuple[Tensor, Tensor]:
        bn, eps = self.vae.bn, self.vae.config.batch_norm_eps
        return bn.running_mean[:, None, None], (bn.running_var[:, None, None] + eps).sqrt()


class Flux2Klein(Flux2):
    """Wraps a `Flux2KleinPipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each; the negative
    prompt is empty. Train the base model. The distilled model generates images in four steps
    without guidance. Guidance above 1 raises ValueError for it, and training with many steps undoes
    the distillation.
    """

    pipeline_class = "Flux2KleinPipeline"

    has_guidance = True

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 4.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        super().__init__(
            path, height, width, 1.0, lora, precision, max_sequence_length, gradient_checkpointing
        )
        self.embedded_guidance, self.guidance = None, guidance
        self.evaluations_per_velocity = 2 if guidance > 1 else 1

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        if self.guidance > 1 and self.folder.setting("is_distilled"):
            raise ValueError(
                f"guidance is {self.guidance}, but {self.path} is distilled and supports none: "
                "set policy.guidance to 1, or train the base model"
            )
        return super().shape_of_latents(transformer, vae)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        return read_with_negatives(
            lambda prompts: {"text": self.read(prompts)},
            prompts_of(requests),
            "",
            self.guidance > 1,
        )

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        v = super().velocity(x, sigma, cond)
        if self.guidance <= 1:
            return v
        v_neg = self.evaluate(x, sigma, cond["text_neg"])
        return v_neg + self.guidance * (v - v_neg)

"""Wraps Stable Diffusion 1.x, 2.x and XL, which have a UNet, as policies in flow coordinates."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.codec import Codec
from pipelines.network.schedules import predict_flow, trailing_sigmas
from pipelines.network.weights import ATTENTION, Lora
from pipelines.parts.evaluation import grid_of, guide
from pipelines.parts.folder import Config, check_channels
from pipelines.policy import DiffusersPolicy, Precision

LORA = Lora(rank=8, alpha=8, target_modules=ATTENTION)
"""Default adapter, rank 8. Source: diffusers' LoRA example of Diffusion-DPO."""


_INPUTS = "time_cond_proj_dim", "class_embed_type", "num_class_embeds", "encoder_hid_dim_type"
UNREAD = dict.fromkeys(f"unet.{name}" for name in (*_INPUTS, "addition_embed_type"))
"""Inputs of UNets of other pipelines, such as the guidance of latent consistency models."""


class UNetPolicy(DiffusersPolicy):
    """Wraps a variance-preserving, discrete-time diffusion model as a policy in flow coordinates.

    States are flow states, see `functional.diffusion`. The network may predict the noise, v or the
    data; its output is converted to the velocity of a flow. An Euler step equals the model's
    deterministic DDIM step. Timesteps run evenly ("trailing") from the model's last one, sigma_max
    < 1, to sigma = 0, regardless of the scheduler's file. With a fixed first timestep, `noise` can
    draw states of the right scale without knowing the number of steps. Between the model's
    timesteps the network receives fractional ones; sigmas outside their range get the nearest.

    `cond` holds "text", the UNet's added conditions by their names, and a "_neg" entry for each
    condition that differs without the prompt.
    """

    transformer_class = "UNet2DConditionModel"
    default_lora = LORA
    fixed = UNREAD
    denoiser_name = "unet"
    latents_argument = "sample"

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        guidance: Guidance = 7.5,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        gradient_checkpointing: bool = False,
    ):
        codec = Codec(height, width)
        super().__init__(
            path, codec, lora, precision, guidance, gradient_checkpointing=gradient_checkpointing
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        kinds = "a UNet for inpainting or editing takes more, and is not supported"
        check_channels(self, transformer, vae["latent_channels"], kinds)
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        return transformer["in_channels"], *grid_of(self, factor)

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return prod(latent_shape) // transformer["in_channels"]

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return trailing_sigmas(scheduler, num_steps)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guide(self._unguided, x, sigma.expand(len(x)), cond, self.guidance)

    def _unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        def predict(state: Tensor, time: Tensor) -> Tensor:
            return self.call_denoiser(
                state,
                timestep=time,
                encoder_hidden_states=cond["text"],
                added_cond_kwargs={name: value for name, value in cond.items() if name != "text"},
            )

        return predict_flow(self.pipe.scheduler, predict, x, sigma)


class SD15(UNetPolicy):
    """Wraps a `StableDiffusionPipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. The safety
    checker is not loaded.
    """

    pipeline_class = "StableDiffusionPipeline"
    skip_components = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder"))
    skip_components |= {"requires_safety_checker": False}

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        guided = self.guidance > 1
        text, text_neg = self.pipe.encode_prompt(
            prompts_of(requests),
            self.denoiser.device,
            1,
            do_classifier_free_guidance=guided,
        )
        return {"text": text, "text_neg": text_neg} if guided else {"text": text}


class SDXL(UNetPolicy):
    """Wraps a `StableDiffusionXLPipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. The size
    conditioning is part of `cond`. It claims that the original image had the policy's size and was
    not cropped.
    """

    pipeline_class = "StableDiffusionXLPipeline"
    fixed = dict.fromkeys(("vae.latents_mean", "vae.latents_std"), None) | UNREAD
    fixed |= {"unet.addition_embed_type": "text_time"}
    conditions_on_size = True
    skip_components = dict.fromkeys(("feature_extractor", "image_encoder"))
    skip_components |= {"add_watermarker": False}

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 5.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        gradient_checkpointing: bool = False,
    ):
        super().__init__(path, height, width, guidance, lora, precision, gradient_checkpointing)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        guided = self.guidance > 1
        text, text_neg, pooled, pooled_neg = self.pipe.encode_prompt(
            prompts_of(requests),
            device=self.denoiser.device,
            do_classifier_free_guidance=guided,
        )
        size = [self.height, self.width]
        times = text.new_tensor([*size, 0, 0, *size]).repeat(len(requests), 1)
        cond = {"text": text, "text_embeds": pooled, "time_ids": times}
        return cond | {"text_neg": text_neg, "text_embeds_neg": pooled_neg} if guided else cond

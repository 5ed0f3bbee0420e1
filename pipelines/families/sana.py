"""Wraps Sana as a flowalign policy: one network for small latents, by Euler steps of its flow."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.codec import Codec
from pipelines.network.schedules import shift_sigmas
from pipelines.network.weights import ATTENTION, Lora
from pipelines.parts.evaluation import grid_of, guide, with_negatives
from pipelines.parts.folder import Config
from pipelines.parts.libraries import diffusers
from pipelines.policy import DiffusersPolicy, Precision

LORA = Lora(target_modules=ATTENTION)
"""Default adapter: attention of both kinds; diffusers' dreambooth leaves out `to_out.0`."""
UNIT = 32
"""Unit of an image's height and width, in pixels. Source: diffusers' SanaPipeline."""


class Sana(DiffusersPolicy):
    """Wraps a `SanaPipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. Prompts are
    prefixed with the pipeline's default instruction. The released folders name a second-order
    solver, which uses earlier steps. The policy makes Euler steps of the same flow and shift, with
    timesteps that are not rounded. It equals the pipeline with a flow-matching Euler scheduler,
    given sigmas, and without `use_resolution_binning`.
    """

    pipeline_class = "SanaPipeline"
    transformer_class = "SanaTransformer2DModel"
    fixed = dict.fromkeys(["transformer.guidance_embeds"], False)
    default_lora = LORA

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 4.5,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 300,
        gradient_checkpointing: bool = False,
    ):
        if precision == "fp16":
            # Under autocast the products of linear attention exceed 65504, and 1e-15 becomes 0.
            raise ValueError(
                "policy.precision is fp16, in which Sana's linear attention gives NaN; "
                "allowed here: bf16, fp32"
            )
        codec = Codec(height, width)
        super().__init__(
            path, codec, lora, precision, guidance, max_sequence_length, gradient_checkpointing
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        grid_of(self, UNIT)
        self.time_scale = 1000 * transformer["timestep_scale"]
        pixels = 2 ** (len(vae["encoder_block_out_channels"]) - 1)  # along a side of a latent
        return transformer["in_channels"], self.height // pixels, self.width // pixels

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        _, height, width = latent_shape  # text has cross-attention only
        return height * width // transformer["patch_size"] ** 2

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        config = scheduler.config
        shift = config["flow_shift"] if "flow_shift" in config else config["shift"]
        return shift_sigmas(diffusers.FlowMatchEulerDiscreteScheduler(shift=shift), 0.0, num_steps)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        text, mask, text_neg, mask_neg = self.pipe.encode_prompt(
            prompts_of(requests),
            self.guidance > 1,
            device=self.denoiser.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=_instruction(),
        )
        negative = {"text": text_neg, "mask": mask_neg}
        return with_negatives({"text": text, "mask": mask}, negative, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        time = self.time_scale * sigma.expand(len(x))
        return guide(self._denoise, x, time, cond, self.guidance)

    def _denoise(self, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
        return self.call_denoiser(
            x,
            timestep=time,
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
        )


def _instruction() -> list[str]:
    """Return the instruction that the pipeline prepends to a prompt."""
    call = inspect.signature(diffusers.SanaPipeline.__call__)
    return call.parameters["complex_human_instruction"].default

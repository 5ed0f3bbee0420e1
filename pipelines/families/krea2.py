"""Wraps Krea 2 as a flowalign policy: latents of Qwen-Image, text states of twelve layers."""

from typing import Any

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt
from pipelines.families.qwen_image import QwenImage
from pipelines.network.schedules import shift_sigmas
from pipelines.network.weights import ATTENTION, DTYPES, Lora
from pipelines.parts.evaluation import pack, positions
from pipelines.parts.folder import Config
from pipelines.policy import Precision

LORA = Lora(rank=32, alpha=32, target_modules=(*ATTENTION, "to_gate"))
"""Default adapter: attention, as diffusers' dreambooth recommends for long runs.

These names also match the blocks that fuse the layers of a text. If a run file sets only some
fields of `lora`, the layers are still these, but a missing rank or alpha has the default of `Lora`.
"""
DISTILLED_SHIFT = 1.15
"""Shift of the distilled model at any size. Source: diffusers' Krea2Pipeline."""


class Krea2(QwenImage):
    """Wraps a `Krea2Pipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. It is the
    usual scale. The pipeline's `guidance_scale` is added on top of the conditional velocity, so it
    is one less. `cond` holds the hidden states of several layers of the text encoder, which the
    network fuses. With the released model this takes 31 MB for a prompt of 512 tokens in bf16.
    """

    pipeline_class = "Krea2Pipeline"
    transformer_class = "Krea2Transformer2DModel"
    default_lora = LORA
    negative = ""
    restores_norm = False
    distilled: bool

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 5.5,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        super().__init__(
            path,
            height,
            width,
            guidance,
            lora,
            precision,
            max_sequence_length,
            gradient_checkpointing,
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        self.distilled = bool(self.folder.setting("is_distilled"))
        return super().shape_of_latents(transformer, vae)

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        if self.distilled:
            return shift_sigmas(scheduler, DISTILLED_SHIFT, num_steps)
        return super().sigmas(scheduler, num_steps)

    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        text, mask = self.pipe.encode_prompt(
            prompts, self.denoiser.device, max_sequence_length=self.max_sequence_length
        )
        return {"text": text, "mask": mask}

    def evaluate(self, x: Tensor, sigma: Tensor, cond: Cond, ending: str) -> Tensor:
        text = cond[f"text{ending}"]
        time = (sigma * 1000 / 1000).to(DTYPES[self.precision])  # rounded as in the pipeline
        words = x.new_zeros(text.shape[1], 3)
        return self.call_denoiser(
            pack(x),
            timestep=time.expand(len(x)),
            position_ids=torch.cat([words, positions(0, self.grid, x)]),
            encoder_hidden_states=text,
            encoder_attention_mask=cond[f"mask{ending}"],
        )

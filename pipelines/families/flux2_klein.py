"""Wraps FLUX.2-klein as a flowalign policy: the small FLUX.2, with classifier-free guidance."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.families.flux2 import LORA, Flux2
from pipelines.network.weights import Lora
from pipelines.parts.folder import Config
from pipelines.parts.guidance import read_with_negatives
from pipelines.policy import Precision


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

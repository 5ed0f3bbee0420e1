"""Wraps Stable Diffusion XL as a flowalign policy."""

from collections.abc import Sequence

import torch

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.families.unet import LORA, UNetPolicy
from pipelines.network.weights import Lora
from pipelines.policy import Precision


class SDXL(UNetPolicy):
    """Wraps a `StableDiffusionXLPipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. The size
    conditioning is part of `cond`. It claims that the original image had the policy's size and was
    not cropped.
    """

    pipeline_class = "StableDiffusionXLPipeline"
    conditions_on_size = True
    skip_components = dict.fromkeys(("feature_extractor", "image_encoder")) | {
        "add_watermarker": False
    }

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

"""Wraps Stable Diffusion 1.x and 2.x as a flowalign policy."""

from collections.abc import Sequence

import torch

from flowalign.types import Cond, Request, prompts_of
from pipelines.families.unet import UNetPolicy


class SD15(UNetPolicy):
    """Wraps a `StableDiffusionPipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. The safety
    checker is not loaded.
    """

    pipeline_class = "StableDiffusionPipeline"
    skip_components = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder")) | {
        "requires_safety_checker": False
    }

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

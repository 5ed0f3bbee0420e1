"""Wraps Z-Image as a flowalign policy: texts without padding, and time that starts at noise."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from flowalign.utils.imports import LazyModule
from pipelines.codec import Codec
from pipelines.network.schedules import shift_by_size
from pipelines.network.weights import ATTENTION, Lora
from pipelines.parts.encoding import pad_texts
from pipelines.parts.evaluation import grid_of, read_once, with_negatives
from pipelines.parts.folder import Config
from pipelines.policy import DiffusersPolicy, Precision

_pipeline = LazyModule("diffusers.pipelines.z_image.pipeline_z_image")

LORA = Lora(target_modules=ATTENTION)
"""Default adapter: attention of all blocks including refiners, as in diffusers' dreambooth."""


class ZImage(DiffusersPolicy):
    """Wraps a `ZImagePipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. It is the
    usual scale. The pipeline's `guidance_scale` is added on top of the conditional velocity, so it
    is one less. The pipeline's `cfg_normalization` and `cfg_truncation` are off, as by default.

    The network sees texts without padding. `cond` holds them padded, with their lengths.
    """

    pipeline_class = "ZImagePipeline"
    transformer_class = "ZImageTransformer2DModel"
    default_lora = LORA
    no_features = "has a last layer per patch size"
    latents_argument = "x"

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 6.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        codec = Codec(height, width)
        super().__init__(
            path, codec, lora, precision, guidance, max_sequence_length, gradient_checkpointing
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        self.grid = grid_of(self, 2 ** len(vae["block_out_channels"]))  # tokens of 2 x 2 latents
        return transformer["in_channels"], 2 * self.grid[0], 2 * self.grid[1]

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:  # noqa: ARG002
        return prod(self.grid) + self.max_sequence_length

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        even = _pipeline.get_default_z_image_sigmas(num_steps)
        return shift_by_size(scheduler, prod(self.grid), num_steps, even)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        texts, empty = self.pipe.encode_prompt(
            list(prompts_of(requests)),  # a copy, which the pipeline modifies
            self.denoiser.device,
            do_classifier_free_guidance=self.guidance > 1,
            max_sequence_length=self.max_sequence_length,
        )
        longest = self.max_sequence_length
        negative = pad_texts(empty, longest) if empty else {}
        return with_negatives(pad_texts(texts, longest), negative, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        sigma, texts = sigma.expand(len(x)), remove_padding(cond["text"], cond["length"])
        if self.guidance <= 1:
            return self.evaluate(x, sigma, texts)
        texts += remove_padding(cond["text_neg"], cond["length_neg"])
        v, v_neg = self.evaluate(torch.cat([x, x]), sigma.repeat(2), texts).chunk(2)
        return v_neg + self.guidance * (v - v_neg)

    def evaluate(self, x: Tensor, sigma: Tensor, texts: list[Tensor]) -> Tensor:
        """Return the velocity. The network's time is 0 at noise and its output points to data."""
        return -self.call_denoiser(x, t=(1000 - 1000 * sigma) / 1000, cap_feats=texts)

    def call_denoiser(self, x: Tensor, **inputs: Any) -> Tensor:
        """Evaluate the network, which takes and returns lists of clips of one frame."""

        def evaluate(x: Tensor, **others: Any) -> Any:
            return self.denoiser(x=list(x[:, :, None]), **others)

        outputs = self.network.evaluate(evaluate, x, **inputs)[0]
        return torch.stack(list(outputs))[:, :, 0].float()


def remove_padding(
    texts: Float[Tensor, "n longest d"], lengths: Tensor
) -> list[Float[Tensor, "length d"]]:
    """Return each text truncated to its length."""
    return [text[:length] for text, length in zip(texts, read_once(lengths), strict=True)]

"""Wraps Stable Diffusion 3 and 3.5 of any size as a flowalign policy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.codec import Codec
from pipelines.network.weights import Lora
from pipelines.parts.evaluation import grid_of, guide, with_negatives
from pipelines.parts.folder import Config
from pipelines.policy import DiffusersPolicy, Precision


class SD3(DiffusersPolicy):
    """Wraps a `StableDiffusion3Pipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each.
    """

    pipeline_class = "StableDiffusion3Pipeline"
    transformer_class = "SD3Transformer2DModel"
    extra_text_tokens = 77  # of CLIP

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        guidance: Guidance = 4.5,
        lora: Lora | None = Lora(),  # noqa: B008 (frozen)
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 256,
        gradient_checkpointing: bool = False,
    ):
        codec = Codec(height, width)
        super().__init__(
            path, codec, lora, precision, guidance, max_sequence_length, gradient_checkpointing
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        unit = factor * transformer["patch_size"]
        limit = unit * transformer.get("pos_embed_max_size", 96)
        if max(grid_of(self, unit)) * unit > limit:
            raise ValueError(
                f"size {self.width}x{self.height}: the position embeddings of {self.path} reach "
                f"{limit} pixels: make both sides at most {limit}"
            )
        return transformer["in_channels"], self.height // factor, self.width // factor

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        _, height, width = latent_shape
        text = self.extra_text_tokens + self.max_sequence_length
        return height * width // transformer["patch_size"] ** 2 + text

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        text, text_neg, pooled, pooled_neg = self.pipe.encode_prompt(
            prompts_of(requests),
            None,
            None,
            do_classifier_free_guidance=self.guidance > 1,
            max_sequence_length=self.max_sequence_length,
            device=self.denoiser.device,
        )
        negative = {"text": text_neg, "pooled": pooled_neg}
        return with_negatives({"text": text, "pooled": pooled}, negative, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guide(self._denoise, x, 1000 * sigma.expand(len(x)), cond, self.guidance)

    def _denoise(self, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
        return self.call_denoiser(
            x,
            timestep=time,
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
        )

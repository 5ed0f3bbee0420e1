"""Wraps Qwen-Image 2.1 as a flowalign policy: no padding, and pictures with an alpha channel."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from flowalign.types import Cond, Guidance, PositiveInt
from pipelines.base import Precision
from pipelines.encoding import ragged
from pipelines.folder import setting_of
from pipelines.packing import grid_of
from pipelines.qwen_image import QwenImage
from pipelines.rows import one_kind_at_a_time
from pipelines.schedules import rounded_times
from pipelines.weights import Lora

LORA = Lora(target_modules=("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"))
"""Default adapter: attention, of which this network has one stream."""


class QwenImage21(QwenImage):
    """Wraps a `QwenImage21Pipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each; it keeps no
    norm. In this network the place of a picture follows the padded text, so what a prompt gives in
    the pipeline depends on the longest prompt of its call. Here nothing is padded: prompts of
    different lengths are evaluated apart, each as in a call of its own. Longer ones than
    `max_sequence_length` are refused, because the pipeline cuts nothing.

    Decoded pictures are laid over white by their alpha channel; encoded ones are opaque.
    """

    pipeline_class: Any = QwenImage21Pipeline
    transformer_class: Any = QwenImage21Transformer2DModel

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 1.0,
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

    def shape_of_latents(
        self,
        transformer: Mapping[str, Any],  # noqa: ARG002
        vae: Mapping[str, Any],
    ) -> tuple[int, ...]:
        if setting_of(self.pipeline_class, self.path, "sample_sigmas"):
            raise ValueError(
                f"{self.path} has fixed sigmas of its own (sample_sigmas), so it is distilled to "
                "a few steps: train the model that it was distilled from"
            )
        rows, columns = grid_of(self, 2 ** (len(vae["temperal_downsample"]) + 1))
        self.grid = 2 * rows, 2 * columns  # a latent is a token, and four stand for one of the text
        return vae["z_dim"], *self.grid

    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [self.pipe.encode_prompt(p, device=self.denoiser.device)[0][0] for p in prompts]
        longest = self.max_sequence_length
        for prompt, text in zip(prompts, texts, strict=True):
            if len(text) > longest:
                raise ValueError(
                    f"{prompt!r} has {len(text)} tokens; policy.max_sequence_length is {longest}"
                )
        return ragged(texts, longest)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return one_kind_at_a_time(super().velocity, cond["length"], x, sigma, cond)

    def guided(self, v: Tensor, v_neg: Tensor) -> Tensor:
        return v_neg + self.guidance * (v - v_neg)

    def answer(self, x: Tensor, sigma: Tensor, cond: Cond, ending: str) -> Tensor:
        length, tokens = int(cond[f"length{ending}"][0]), prod(self.grid)
        pictures = torch.arange(length + tokens // 4, device=x.device) >= length
        v = self.call_denoiser(
            x.flatten(2).mT,
            timestep=rounded_times(sigma, len(x), self.precision),
            encoder_hidden_states=cond[f"text{ending}"][:, :length],
            img_shapes=[[(1, *self.grid)]] * len(x),
            img_mask=pictures.expand(len(x), -1),
        )
        return v[:, -tokens:]

    def unpacked(self, tokens: Tensor) -> Tensor:
        return tokens.mT.unflatten(2, self.grid)

    def decoded(self, x: Tensor) -> Tensor:
        colours, alpha = super().decoded(x).split([3, 1], dim=2)
        return alpha * colours + 1 - alpha

    def latents(self, pictures: Tensor) -> Tensor:
        return super().latents(pad(pictures, (0, 0, 0, 0, 0, 1), value=1.0))  # opaque

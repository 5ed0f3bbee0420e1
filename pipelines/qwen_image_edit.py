"""Wraps Qwen-Image-Edit Plus as a flowalign policy: requests come with one to several pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    calculate_dimensions,
)
from PIL import Image
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, Takes
from pipelines.base import Precision
from pipelines.packing import pack
from pipelines.qwen_image import QwenImage, padded
from pipelines.references import check_taken, cropped
from pipelines.rows import one_kind_at_a_time
from pipelines.weights import Lora


@dataclass(frozen=True, kw_only=True)
class References:
    """Configures the pictures of a request, as the text encoder and the network see them."""

    most: PositiveInt = 1
    """Number of pictures that a request may have."""
    area: PositiveInt = 1024 * 1024
    """Pixels of each picture that the network sees. Default: those of the pipeline."""
    max_tokens: PositiveInt = 1024
    """Tokens of an instruction together with its pictures, to which all are padded."""


class QwenImageEdit(QwenImage):
    """Wraps a `QwenImageEditPlusPipeline` folder or hub identifier as an editing policy.

    A request has one to `references.most` pictures. They are cropped around their centre to the
    proportions of the policy's size, then treated as in the pipeline: the text encoder sees them
    with the instruction, and with the negative prompt, at 384 x 384 pixels, and the network at
    `references.area` pixels, which are 1024 x 1024 in the pipeline.

    `cond` holds, beside the text, "sources": latents of the pictures, and "count": how many there
    are. Requests of several numbers of pictures are evaluated one number after another. Text and
    pictures together have at most `references.max_tokens`; the pipeline cuts nothing, so a longer
    instruction is refused.
    """

    pipeline_class = QwenImageEditPlusPipeline

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 4.0,
        lora: Lora | None = Lora(),  # noqa: B008 (frozen)
        precision: Precision = "bf16",
        gradient_checkpointing: bool = False,
        references: References = References(),
    ):
        super().__init__(
            path,
            height,
            width,
            guidance,
            lora,
            precision,
            references.max_tokens,
            gradient_checkpointing,
        )
        self.references, self.film = references, (references.area,)
        self.takes = Takes(references=(1, references.most), kind="source")

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        shape = super().shape_of_latents(transformer, vae)
        width, height = calculate_dimensions(self.references.area, self.width / self.height)
        patch = self.height // self.grid[0]
        self.reference_grid = height // patch, width // patch
        if not all(self.reference_grid):
            raise ValueError(
                f"policy.references.area is {self.references.area}: "
                f"pictures of {width}x{height} have no tokens"
            )
        return shape

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:
        pictures = self.references.most * prod(self.reference_grid)
        return super().num_tokens(latent_shape, transformer) + pictures

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Encode instructions with their pictures, one row per request.

        Raises:
            ValueError: a request has no picture, too many, or with them too many tokens.
        """
        check_taken(self, requests)
        rows = [self._edit(request) for request in requests]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _edit(self, request: Request) -> dict[str, Tensor]:
        """Encode one request: the pipeline shows all pictures of a call with every prompt."""
        proportion = self.width / self.height
        pictures = [cropped(one, proportion) for one in request.references]
        width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, proportion)
        shown = [self.pipe.image_processor.resize(p, height, width) for p in pictures]
        cond = self._show(request.prompt, shown)
        if self.guidance > 1:
            empty = self._show(self.negative, shown)
            cond |= {f"{name}_neg": value for name, value in empty.items()}
        number = torch.tensor([len(pictures)], device=self.denoiser.device)
        return cond | {"sources": self._sources(pictures), "count": number}

    def _show(self, prompt: str, pictures: list[Image.Image]) -> dict[str, Tensor]:
        text, mask = self.pipe.encode_prompt(prompt, pictures, self.denoiser.device)
        if text.shape[1] > self.max_sequence_length:
            raise ValueError(
                f"{prompt!r} with its {len(pictures)} pictures has {text.shape[1]} tokens; "
                f"policy.references.max_tokens is {self.references.max_tokens}"
            )
        return padded(text, mask, self.max_sequence_length)

    def _sources(self, pictures: list[Image.Image]) -> Tensor:
        """Return latents [1, references.most, C, h, w] of the pictures, and zeros behind them."""
        patch, device = self.height // self.grid[0], self.pipe.vae.device
        height, width = (patch * side for side in self.reference_grid)
        pixels = [self.pipe.image_processor.preprocess(p, height, width) for p in pictures]
        known = torch.cat([self.latents(one.to(device)) for one in pixels])
        absent = known.new_zeros(self.references.most - len(known), *known.shape[1:])
        return torch.cat([known, absent])[None]

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return one_kind_at_a_time(super().velocity, cond["count"], x, sigma, cond)

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, list[tuple[int, int, int]]]:
        sources = cond["sources"][:, : int(cond["count"][0])].unbind(1)
        shapes = [(1, *self.grid), *[(1, *self.reference_grid)] * len(sources)]
        return torch.cat([pack(one) for one in (x, *sources)], 1), shapes

"""Wraps Qwen-Image-Edit Plus as a flowalign policy: requests have one or more images."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowalign.types import Cond, Guidance, InputSpec, PositiveInt, Request
from flowalign.utils.imports import LazyModule
from pipelines.families.qwen_image import QwenImage
from pipelines.network.weights import Lora
from pipelines.parts.encoding import check_references, crop_reference, pad_text
from pipelines.parts.evaluation import evaluate_by_kind, pack, read_once, stack_rows, with_negatives
from pipelines.parts.folder import Config
from pipelines.policy import Precision

_pipeline = LazyModule("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus")


@dataclass(frozen=True, kw_only=True)
class References:
    """Number and sizes of a request's images."""

    most: PositiveInt = 1
    """Maximum number of images per request."""
    area: PositiveInt = 1024 * 1024
    """Pixels of each image that the network sees. Default: the pipeline's 1024 x 1024."""
    max_tokens: PositiveInt = 1024
    """Maximum tokens of an instruction with its images; all requests are padded to it."""

    def grid(self, proportion: float, patch: int, path: str) -> tuple[int, int]:
        """Return rows and columns of an image's tokens of `patch` pixels, for the model at `path`.

        Raises:
            ValueError: The area is too small for one token.
        """
        width, height = _pipeline.calculate_dimensions(self.area, proportion)
        if height < patch or width < patch:
            raise ValueError(
                f"policy.references.area is {self.area}: images of {width}x{height} are smaller "
                f"than one token of {path}"
            )
        return height // patch, width // patch


def for_text(pipe: Any, pictures: Sequence[Image.Image], proportion: float) -> list[Image.Image]:
    """Return images in the size that the text encoder sees."""
    width, height = _pipeline.calculate_dimensions(_pipeline.CONDITION_IMAGE_SIZE, proportion)
    return [pipe.image_processor.resize(one, height, width) for one in pictures]


class QwenImageEdit(QwenImage):
    """Wraps a `QwenImageEditPlusPipeline` folder or hub identifier as an editing policy.

    A request has one to `references.most` images. They are centre-cropped to the policy's aspect
    ratio and then processed as in the pipeline. The text encoder sees them at 384 x 384 pixels,
    together with the instruction or the negative prompt. The network sees them at `references.area`
    pixels; the pipeline uses 1024 x 1024.

    In addition to the text, `cond` holds "sources", the latents of the images, and "count", their
    number. Requests with different counts are evaluated in separate calls. Text and images together
    may have at most `references.max_tokens`. Longer instructions raise ValueError, because the
    pipeline truncates nothing.
    """

    pipeline_class = "QwenImageEditPlusPipeline"

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
        self.input_spec = InputSpec(references=(1, references.most), kind="source")
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
        self.references, self.codec.options = references, (references.area,)

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        shape = super().shape_of_latents(transformer, vae)
        patch, proportion = self.height // self.grid[0], self.width / self.height
        self.reference_grid = self.references.grid(proportion, patch, self.path)
        return shape

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        pictures = self.references.most * prod(self.reference_grid)
        return super().num_tokens(latent_shape, transformer) + pictures

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Encode instructions with their images, one row per request.

        Raises:
            ValueError: A request has no image or too many, or has too many tokens.
        """
        check_references(self, requests)
        return stack_rows([self._edit(request) for request in requests])

    def _edit(self, request: Request) -> dict[str, Tensor]:
        """Encode one request; the pipeline would show all images of a call to every prompt."""
        proportion = self.width / self.height
        pictures = [crop_reference(one, proportion) for one in request.references]
        shown = for_text(self.pipe, pictures, proportion)
        empty = self._show(self.negative, shown) if self.guidance > 1 else {}
        cond = with_negatives(self._show(request.prompt, shown), empty, self.guidance > 1)
        number = torch.tensor([len(pictures)], device=self.denoiser.device)
        return cond | {"sources": self._sources(pictures), "count": number}

    def _show(self, prompt: str, pictures: list[Image.Image]) -> dict[str, Tensor]:
        text, mask = self.pipe.encode_prompt(prompt, pictures, self.denoiser.device)
        if text.shape[1] > self.max_sequence_length:
            raise ValueError(
                f"{prompt!r} with its {len(pictures)} images has {text.shape[1]} tokens; "
                f"policy.references.max_tokens is {self.references.max_tokens}"
            )
        return pad_text(text, mask, self.max_sequence_length)

    def _sources(self, pictures: list[Image.Image]) -> Tensor:
        """Return latents [1, references.most, C, h, w] of the images, padded with zeros."""
        patch, device = self.height // self.grid[0], self.pipe.vae.device
        height, width = (patch * side for side in self.reference_grid)
        pixels = [self.pipe.image_processor.preprocess(p, height, width) for p in pictures]
        known = torch.cat([self.codec.encode(one.to(device)) for one in pixels])
        absent = known.new_zeros(self.references.most - len(known), *known.shape[1:])
        return torch.cat([known, absent])[None]

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return evaluate_by_kind(super().velocity, cond["count"], x, sigma, cond)

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, list[tuple[int, ...]]]:
        sources = cond["sources"][:, : read_once(cond["count"])[0]].unbind(1)
        shapes = [(1, *self.grid), *[(1, *self.reference_grid)] * len(sources)]
        return torch.cat([pack(one) for one in (x, *sources)], 1), shapes

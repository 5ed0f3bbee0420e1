"""Wraps Qwen-Image-Edit Plus as a flowalign policy: requests come with one to several pictures."""

from collections.abc import Sequence
from math import prod

import torch
from diffusers import QwenImageEditPlusPipeline
from PIL import Image
from torch import Tensor

from flowalign.types import Cond, Guidance, InputSpec, PositiveInt, Request
from pipelines.families.qwen_image import QwenImage
from pipelines.families.qwen_references import References, for_text
from pipelines.network.weights import Lora
from pipelines.parts.encoding import pad_text
from pipelines.parts.folder import Config
from pipelines.parts.guidance import with_negatives
from pipelines.parts.packing import pack
from pipelines.parts.references import check_references, crop_reference
from pipelines.parts.rows import evaluate_by_kind, stack_rows
from pipelines.policy import Precision


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
        references: References = References(),  # noqa: B008 (frozen)
    ):
        self.input_spec = InputSpec(references=(1, references.most), kind="source")
        super().__init__(
            *(path, height, width, guidance, lora, precision),
            *(references.max_tokens, gradient_checkpointing),
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
        """Encode instructions with their pictures, one row per request.

        Raises:
            ValueError: a request has no picture, too many, or with them too many tokens.
        """
        check_references(self, requests)
        return stack_rows([self._edit(request) for request in requests])

    def _edit(self, request: Request) -> dict[str, Tensor]:
        """Encode one request: the pipeline shows all pictures of a call with every prompt."""
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
                f"{prompt!r} with its {len(pictures)} pictures has {text.shape[1]} tokens; "
                f"policy.references.max_tokens is {self.references.max_tokens}"
            )
        return pad_text(text, mask, self.max_sequence_length)

    def _sources(self, pictures: list[Image.Image]) -> Tensor:
        """Return latents [1, references.most, C, h, w] of the pictures, and zeros behind them."""
        patch, device = self.height // self.grid[0], self.pipe.vae.device
        height, width = (patch * side for side in self.reference_grid)
        pixels = [self.pipe.image_processor.preprocess(p, height, width) for p in pictures]
        known = torch.cat([self.codec.encode(one.to(device)) for one in pixels])
        absent = known.new_zeros(self.references.most - len(known), *known.shape[1:])
        return torch.cat([known, absent])[None]

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return evaluate_by_kind(super().velocity, cond["count"], x, sigma, cond)

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, list[tuple[int, int, int]]]:
        sources = cond["sources"][:, : int(cond["count"][0])].unbind(1)
        shapes = [(1, *self.grid), *[(1, *self.reference_grid)] * len(sources)]
        return torch.cat([pack(one) for one in (x, *sources)], 1), shapes

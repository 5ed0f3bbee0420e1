"""Wraps FLUX.1 Fill as a flowalign policy that inpaints the masked part of an image."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from flowalign.functional.resizing import resize_to_cover
from flowalign.types import Cond, Guidance, InputSpec, PositiveInt, Request
from pipelines.families.flux1 import LORA, Flux1
from pipelines.network.weights import Lora
from pipelines.parts.folder import Config
from pipelines.parts.packing import pack, positions
from pipelines.parts.references import check_references, read_hole
from pipelines.policy import Precision


class Flux1Fill(Flux1):
    """Wraps a `FluxFillPipeline` folder or hub identifier as an inpainting policy.

    A request has one reference image and a mask of the same size, white where to paint. Both are
    resized and centre-cropped to the policy's size. As in the pipeline, pixels outside the mask are
    also generated and not pasted back.

    In addition to the text, `cond` holds "source", which the network sees with the state: the mask,
    and the latents of the image without the masked part. The pipeline samples these latents from
    the autoencoder's distribution. This policy uses the mode, so that a request always has the same
    inputs.
    """

    pipeline_class = "FluxFillPipeline"

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        embedded_guidance: Guidance | None = 30.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        self.input_spec = InputSpec(
            references=(1, 1), mask=True, kind="source", crop=(height, width)
        )
        super().__init__(
            *(path, height, width, embedded_guidance, lora, precision),
            *(max_sequence_length, gradient_checkpointing),
        )

    def condition_channels(self, vae: Config) -> int:
        return vae["latent_channels"] + 4 ** (len(vae["block_out_channels"]) - 1)

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        return pack(torch.cat([x, cond["source"]], 1)), positions(0, self.grid, x)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Encode prompts, images and masks, one row per request.

        Raises:
            ValueError: A request does not have exactly one image, or its mask is missing, differs
                in size or is black.
        """
        check_references(self, requests)
        sources = torch.cat([self._masked(request) for request in requests])
        return {**super().encode(requests), "source": sources}

    def _masked(self, request: Request) -> Tensor:
        """Return the latents of a request's image outside the mask, and the mask."""
        picture, device = request.references[0].read(), self.pipe.vae.device
        assert request.mask is not None  # see check_references
        hole = read_hole(request.mask, picture, self.height, self.width).to(device, torch.float32)
        pixels = resize_to_cover(picture.to(device, torch.float32), self.height, self.width)
        side = self.height // (2 * self.grid[0])
        known = self.codec.encode((2 * pixels - 1) * (1 - hole))
        return torch.cat([known, pixel_unshuffle(hole, side)], 1)

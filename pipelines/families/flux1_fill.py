"""Wraps FLUX.1 Fill as a flowalign policy: it paints what the mask of a request leaves open."""

from collections.abc import Sequence

import torch
from diffusers import FluxFillPipeline
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

    A request has one reference, and a mask of its size that is white where to paint. Both are
    resized to cover the policy's size and cropped to it around the centre. What surrounds the mask
    is painted anew, too, and not pasted back, as in the pipeline.

    `cond` holds, beside the text, "source": latents of the picture without the masked part, and
    the mask, which the network sees with the state. The pipeline draws these latents from the
    distribution of the autoencoder; here they are its mode, so that a request is always the same.
    """

    pipeline_class = FluxFillPipeline

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
        """Encode prompts, pictures and masks, one row per request.

        Raises:
            ValueError: a request comes with another number of pictures than one, or with a mask
                that is missing, of another size or without a hole.
        """
        check_references(self, requests)
        sources = torch.cat([self._masked(request) for request in requests])
        return {**super().encode(requests), "source": sources}

    def _masked(self, request: Request) -> Tensor:
        """Return latents of the picture around the mask, and the mask, of one request."""
        picture, device = request.references[0].read(), self.pipe.vae.device
        assert request.mask is not None  # checked by now
        hole = read_hole(request.mask, picture, self.height, self.width).to(device, torch.float32)
        pixels = resize_to_cover(picture.to(device, torch.float32), self.height, self.width)
        side = self.height // (2 * self.grid[0])
        known = self.codec.encode((2 * pixels - 1) * (1 - hole))
        return torch.cat([known, pixel_unshuffle(hole, side)], 1)

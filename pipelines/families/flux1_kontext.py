"""Wraps FLUX.1 Kontext as a flowalign policy: every request has the image to edit."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from flowalign.types import Cond, InputSpec, Request
from pipelines.families.flux1 import Flux1
from pipelines.parts.folder import Config
from pipelines.parts.packing import pack, positions
from pipelines.parts.references import check_references


class Flux1Kontext(Flux1):
    """Wraps a `FluxKontextPipeline` folder or hub identifier as an editing policy.

    A request has one reference image, resized and centre-cropped to the policy's size. An image of
    this size is processed as in the pipeline with `_auto_resize=False`. `cond` holds its latents as
    "source" in addition to the text; their tokens follow those of the state.
    """

    pipeline_class = "FluxKontextPipeline"
    input_spec = InputSpec(references=(1, 1), kind="source")

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return super().num_tokens(latent_shape, transformer) + prod(self.grid)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Encode instructions and their images, one row per request.

        Raises:
            ValueError: A request does not have exactly one image.
        """
        check_references(self, requests)
        pictures = [request.references[0].read()[None] for request in requests]
        return {**super().encode(requests), "source": torch.cat([*map(self.embed, pictures)])}

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        places = [positions(number, self.grid, x) for number in (0, 1)]
        return torch.cat([pack(x), pack(cond["source"])], 1), torch.cat(places)

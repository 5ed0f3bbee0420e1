"""Reads the pictures that requests come with, for policies that are conditioned on them."""

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import Reference, Request


def source_of(request: Request) -> Float[Tensor, "1 F 3 h w"]:
    """Return the only picture of a request, as media that `Policy.embed` takes.

    Raises:
        ValueError: it comes with another number of references.
    """
    if len(request.references) != 1:
        raise ValueError(
            f"{request.prompt!r} comes with {len(request.references)} references; "
            "this policy takes 1, the picture to be edited"
        )
    return request.references[0].read()[None]


def probe(prompt: str, brightness: float) -> Request:
    """Return a request with a picture of one grey, for comparing two loaded policies."""
    pixels = torch.full((1, 3, 16, 16), brightness)
    return Request(prompt, (Reference("probe", f"{brightness:g}", pixels.clone),))

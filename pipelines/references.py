"""Reads the pictures and masks that requests come with, for policies that take them."""

import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from flowalign.types import Reference, Request
from pipelines.encoding import covering


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


def hole_of(request: Request, height: int, width: int) -> Bool[Tensor, "1 1 height width"]:
    """Return where the picture of a request is to be painted anew, within the crop of this size.

    Raises:
        ValueError: it has no mask, one of another size than the picture, or one without a hole.
    """
    if request.mask is None:
        raise ValueError(f"{request.prompt!r} comes without the mask that this policy takes")
    mask, picture = request.mask.read(), request.references[0].read()
    if mask.shape[-2:] != picture.shape[-2:]:
        sizes = [f"{one.shape[-1]}x{one.shape[-2]}" for one in (mask, picture)]
        raise ValueError(
            f"mask {request.mask.name} of {request.prompt!r} is {sizes[0]}, its picture {sizes[1]}"
        )
    hole = covering(mask[:1], height, width).mean(1, keepdim=True) >= 0.5
    if not hole.any():
        raise ValueError(
            f"mask {request.mask.name} of {request.prompt!r} is black within the {width}x{height} "
            "that are kept of it: white says where to paint"
        )
    return hole


def cropped(reference: Reference, proportion: float) -> Image.Image:
    """Return the largest centre crop of a picture whose width is `proportion` times its height."""
    pixels = (255 * reference.read()[0]).round().byte().permute(1, 2, 0)
    picture = Image.fromarray(pixels.contiguous().numpy())
    width = min(picture.width, round(picture.height * proportion))
    height = min(picture.height, round(picture.width / proportion))
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


def probe(prompt: str, brightness: float) -> Request:
    """Return a request with a picture of one grey, all of it masked, for comparing two policies."""
    grey, white = (torch.full((1, 3, 16, 16), value) for value in (brightness, 1.0))
    source = Reference("probe", f"{brightness:g}", grey.clone)
    return Request(prompt, (source,), Reference("white", "1", white.clone))

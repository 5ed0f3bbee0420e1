"""Reads the reference images and masks of requests."""

from collections.abc import Sequence

from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from flowalign.functional.resizing import hole_within
from flowalign.types import Policy, Reference, Request


def check_references(policy: Policy, requests: Sequence[Request]) -> None:
    """Check that requests have the reference images and the mask that a policy takes.

    Raises:
        ValueError: A request has other references or another mask.
    """
    for request in requests:
        if misfit := policy.input_spec.misfit(request):
            raise ValueError(f"{request.prompt!r}: {type(policy).__name__} {misfit}")


def read_hole(
    mask: Reference, picture: Float[Tensor, "1 3 h w"], height: int, width: int
) -> Bool[Tensor, "1 1 height width"]:
    """Return the mask of pixels to repaint within the centre crop of (height, width).

    Raises:
        ValueError: The mask and the image differ in size, or the mask is black within the crop.
    """
    pixels = mask.read()
    if pixels.shape != picture.shape:
        sizes = [f"{one.shape[-1]}x{one.shape[-2]}" for one in (pixels, picture)]
        raise ValueError(f"mask {mask.name} is {sizes[0]}, but its image is {sizes[1]}")
    hole = hole_within(pixels, height, width)
    if not hole.any():
        raise ValueError(
            f"mask {mask.name} is black within its {width}x{height} crop: white marks the pixels "
            "to paint"
        )
    return hole


def crop_first_frames(
    requests: Sequence[Request], proportion: float
) -> tuple[list[Image.Image], list[int]]:
    """Return the distinct first frames of requests, cropped, and each request's index into them."""
    given = [request.references[0] for request in requests]
    different = list(dict.fromkeys(given))
    return [crop_reference(one, proportion) for one in different], [
        different.index(one) for one in given
    ]


def to_image(pixels: Float[Tensor, "1 3 h w"]) -> Image.Image:
    """Return an 8-bit PIL image."""
    return Image.fromarray((255 * pixels[0]).round().byte().permute(1, 2, 0).cpu().numpy())


def crop_reference(reference: Reference, proportion: float) -> Image.Image:
    """Return the largest centre crop of an image with a width of `proportion` times its height."""
    picture = to_image(reference.read()[:1])
    width = min(picture.width, max(round(picture.height * proportion), 1))
    height = min(picture.height, max(round(picture.width / proportion), 1))
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))

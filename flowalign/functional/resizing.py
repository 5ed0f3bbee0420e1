"""Resize images and masks."""

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import interpolate


def resize_to_cover(
    pictures: Float[Tensor, "n 3 h w"], height: int, width: int
) -> Float[Tensor, "n 3 height width"]:
    """Resize images to cover the target size, keeping the aspect ratio, and crop the centre.

    Resizing is bicubic with antialiasing, clamped to [0, 1]. Images of the target size do not
    change.
    """
    h, w = pictures.shape[-2:]
    scale = max(height / h, width / w)
    size = max(height, round(h * scale)), max(width, round(w * scale))
    if size != (h, w):
        resized = interpolate(pictures, size, mode="bicubic", antialias=True)
        pictures = resized.clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return pictures[..., top : top + height, left : left + width]


def hole_within(
    mask: Float[Tensor, "1 3 h w"], height: int, width: int
) -> Bool[Tensor, "1 1 height width"]:
    """Return True where a mask is white (>= 0.5) after `resize_to_cover`."""
    return resize_to_cover(mask, height, width).mean(1, keepdim=True) >= 0.5

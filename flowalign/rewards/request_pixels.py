"""Pack, unpack and check the pixels of a request to a reward server."""

from typing import Literal

import torch
from torch import Tensor

Pixels = Literal["float32", "8bit"]
_ROUNDING = 1e-3
"""Tolerance of the range [0, 1], because lower precisions round."""


def pack_pixels(media: Tensor, pixels: Pixels) -> Tensor:
    """Return media as float32, or rounded to 8 bits, on the CPU."""
    media = media.detach().float().cpu()
    if pixels == "8bit":
        media = media.mul(255).add_(0.5).clamp_(0, 255).to(torch.uint8)
    return media.contiguous()


def unpack_pixels(media: Tensor) -> Tensor:
    """Return packed media in [0, 1]."""
    return media.float() / 255 if media.dtype == torch.uint8 else media


def check_shape(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor has the shape and dtype that belong to its name."""
    kind = name.partition(".")[0]
    channels = 1 if kind == "mask" else 3
    expected = (5, "(n, frames, 3, h, w)") if kind == "media" else (3, f"({channels}, h, w)")
    if tensor.ndim != expected[0] or tensor.shape[-3] != channels:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)}, expected {expected[1]}")
    if tensor.dtype not in (torch.uint8, torch.float32):
        raise ValueError(f"{name} of {tensor.dtype}, expected float32 or uint8")


def check_range(name: str, tensor: Tensor) -> None:
    """Raise ValueError for finite values outside [0, 1]; non-finite values are ignored."""
    if tensor.dtype == torch.uint8:
        return
    lowest, highest = (x.item() for x in tensor.nan_to_num(0.5, 0.5, 0.5).aminmax())
    if lowest < -_ROUNDING or highest > 1 + _ROUNDING:
        raise ValueError(
            f"{name} has values in [{lowest:g}, {highest:g}], expected float32 in [0, 1] or uint8"
        )

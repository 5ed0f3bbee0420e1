"""Preprocessing of pixels for image encoders: one path of tensors, with a gradient.

Published models were trained on pictures that PIL resized in 8 bits. `quantised=True` reproduces
that: the value is rounded to 8 bits where PIL rounds it, the gradient passes straight through.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalise(
    frames: Float[Tensor, "n 3 h w"],
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
) -> Float[Tensor, "n 3 h w"]:
    """Subtract the mean and divide by the standard deviation of every channel."""
    return TF.normalize(frames, list(mean), list(std))


def resized(
    frames: Float[Tensor, "n 3 h w"], height: int, width: int, quantised: bool = False
) -> Float[Tensor, "n 3 height width"]:
    """Antialiased bicubic resize.

    Quantised, values are those of PIL on 8-bit pictures (torchvision's 8-bit kernel, at most one
    level of 255 away), with the gradient of the smooth resize.
    """
    size, bicubic = [height, width], InterpolationMode.BICUBIC
    if list(frames.shape[-2:]) == size:
        return frames
    smooth = TF.resize(frames, size, interpolation=bicubic, antialias=True)
    if not quantised:
        return smooth
    bits = (frames.detach() * 255).round().clamp(0, 255).to(torch.uint8)
    exact = TF.resize(bits, size, interpolation=bicubic, antialias=True).to(frames.dtype) / 255
    return smooth + (exact - smooth).detach() if smooth.requires_grad else exact


def shortest_side(
    frames: Float[Tensor, "n 3 h w"], size: int, quantised: bool = False
) -> Float[Tensor, "n 3 size size"]:
    """Resize the shortest side to `size` and crop the centre (CLIP, BLIP)."""
    h, w = frames.shape[-2:]
    long = int(size * max(h, w) / min(h, w))
    height, width = (size, long) if h <= w else (long, size)
    return TF.center_crop(resized(frames, height, width, quantised), [size, size])


def longest_side(frames: Float[Tensor, "n 3 h w"], size: int) -> Float[Tensor, "n 3 size size"]:
    """Resize the longest side to `size` and pad with black around the centre (HPSv2)."""
    h, w = frames.shape[-2:]
    scale = size / max(h, w)
    frames = resized(frames, round(h * scale), round(w * scale))
    down, right = size - frames.shape[-2], size - frames.shape[-1]
    return TF.pad(frames, [right // 2, down // 2, right - right // 2, down - down // 2])


def per_frame(media: Float[Tensor, "n F 3 h w"], scores: Float[Tensor, "n*F"]) -> Tensor:
    """Mean over the frames of each sample: how an image model scores a video."""
    return scores.unflatten(0, media.shape[:2]).mean(1)

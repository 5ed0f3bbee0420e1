"""Selects the frames that a model sees, and preprocesses pixels as tensors, with a gradient.

Published models were trained on images that PIL resized in 8 bits. `quantised=True` reproduces
this: values are rounded to 8 bits where PIL rounds them, with a straight-through gradient.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from reward_models.backbones.libraries import TF
from reward_models.backbones.reward_bases import Unscorable

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalise(
    frames: Float[Tensor, "n 3 h w"],
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
) -> Float[Tensor, "n 3 h w"]:
    """Subtract the mean and divide by the standard deviation of every channel."""
    return TF.normalize(frames, list(mean), list(std))


def resize(
    frames: Float[Tensor, "n 3 h w"], height: int, width: int, quantised: bool = False
) -> Float[Tensor, "n 3 height width"]:
    """Resize by antialiased bicubic interpolation.

    Quantised values equal PIL's for the 8-bit image, so a tensor scores the same as its PNG file.
    """
    if quantised:
        return resize_like_pil(frames, height, width)
    if frames.shape[-2:] == (height, width):
        return frames
    bicubic = TF.InterpolationMode.BICUBIC
    return TF.resize(frames, [height, width], interpolation=bicubic, antialias=True)


def resize_like_pil(
    frames: Float[Tensor, "n 3 h w"], height: int, width: int
) -> Float[Tensor, "n 3 height width"]:
    """Resize 8-bit images bit for bit like PIL 13; the gradient is that of the smooth resize.

    Each axis is resized in fixed point and rounded to 8 bits. Columns come first, unless the height
    shrinks by more than twice the shrinkage of the width in pixels. (PIL before 13 always began
    with columns, which differs by one level in some pixels of images more than twice as tall as
    wide.)
    """
    bits = (frames.detach() * 255).round().clamp(0, 255).double()
    shrinks = frames.shape[2] - height, frames.shape[3] - width
    columns_first = shrinks[0] <= max(0, 2 * shrinks[1])
    for axis, size in ((3, width), (2, height))[:: 1 if columns_first else -1]:
        if bits.shape[axis] != size:
            weights = _weights(bits.shape[axis], size).to(bits.device)
            bits = _levels(bits @ weights.T if axis == 3 else weights @ bits)
    exact = bits.to(frames.dtype) / 255
    if not frames.requires_grad:
        return exact
    smooth = resize(frames, height, width)
    return smooth + (exact - smooth).detach()


_UNIT = 1 << 22
"""Fixed-point value of 1 in PIL's 8-bit resize. Float64 holds all sums exactly, because they are
integers."""


def _levels(sums: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 h w"]:
    return ((sums + _UNIT / 2) / _UNIT).floor().clamp(0, 255)


@lru_cache(maxsize=64)
def _weights(size_in: int, size_out: int) -> Float[Tensor, "size_out size_in"]:
    """Return Keys' cubic (a = -1/2) in fixed point, stretched by the scale if it is above 1."""
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    centre = (torch.arange(size_out, dtype=torch.float64)[:, None] + 0.5) * scale
    index = torch.arange(size_in)
    first = (centre - 2 * stretch + 0.5).long().clamp(min=0)
    end = (centre + 2 * stretch + 0.5).long()
    x = ((index - centre + 0.5) * (1 / stretch)).abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    weights = weights.masked_fill((index < first) | (index >= end), 0.0)
    fixed = weights / weights.sum(1, keepdim=True) * _UNIT
    return (fixed + 0.5 * fixed.sign()).trunc()


def crop_shortest_side(
    frames: Float[Tensor, "n 3 h w"], size: int, quantised: bool = False, floors: bool = False
) -> Float[Tensor, "n 3 size size"]:
    """Resize the shortest side to `size` and crop the centre (CLIP, BLIP).

    For an odd margin, transformers puts the smaller half first (`floors`), torchvision the even
    half.
    """
    h, w = frames.shape[-2:]
    long = int(size * max(h, w) / min(h, w))
    height, width = (size, long) if h <= w else (long, size)
    frames = resize(frames, height, width, quantised)
    if not floors:
        return TF.center_crop(frames, [size, size])
    return TF.crop(frames, (height - size) // 2, (width - size) // 2, size, size)


def pad_longest_side(frames: Float[Tensor, "n 3 h w"], size: int) -> Float[Tensor, "n 3 size size"]:
    """Resize the longest side to `size` and pad with black around the centre (HPSv2)."""
    h, w = frames.shape[-2:]
    scale = size / max(h, w)
    frames = resize(frames, round(h * scale), round(w * scale))
    down, right = size - frames.shape[-2], size - frames.shape[-1]
    return TF.pad(frames, [right // 2, down // 2, right - right // 2, down - down // 2])


def average_over_frames(media: Float[Tensor, "n F 3 h w"], scores: Float[Tensor, "n*F"]) -> Tensor:
    """Average scores over the frames of each sample; image models score videos this way."""
    return scores.unflatten(0, media.shape[:2]).mean(1)


def evenly(num_frames: int, n: int) -> list[int]:
    """Return n evenly spaced frames including first and last; if n is larger, some repeat."""
    return torch.linspace(0, num_frames - 1, n).round().long().tolist()


def sample_frames(
    video: Float[Tensor, "F 3 h w"],
    most: int,
    choose: Callable[[int, int], list[int]] = evenly,
) -> Float[Tensor, "f 3 h w"]:
    """Return at most `most` frames of a video; by default evenly spaced ones."""
    return video[choose(len(video), min(most, len(video)))]


def at_rate(
    num_frames: int,
    fps: float,
    rate: float = 2.0,
    least: int = 4,
    most: int = 768,
    multiple: int = 2,
) -> list[int]:
    """Return about `rate` evenly spaced frames per second of a video of `fps`.

    Their number is a multiple of `multiple`, at least `least` unless the video is shorter, and at
    most `most`. Halves are rounded to even, the default in Python.
    """
    highest = min(most, num_frames) // multiple * multiple
    if highest == 0:
        raise Unscorable(f"{num_frames} frames cannot give a multiple of {multiple}")
    wanted = min(max(num_frames / check_frame_rate(fps) * rate, least), highest)
    return evenly(num_frames, round(wanted / multiple) * multiple)


def each_second(num_frames: int, fps: float, most: int = 24) -> list[int]:
    """Return the frame nearest to each full second (ties: the earlier), at most `most` frames."""
    seconds = range(round((num_frames - 1) / check_frame_rate(fps)) + 1)[:most]
    return [min(range(num_frames), key=lambda i: abs(i - s * fps)) for s in seconds]


def check_frame_rate(fps: float) -> float:
    """Return the frame rate; raise ValueError if it is not positive and finite."""
    if not 0 < fps < float("inf"):
        raise Unscorable(f"{fps} frames per second is not a frame rate")
    return fps


def starts(num_frames: int, n: int) -> list[int]:
    """Return the first frames of n equal parts; the last frame is never used (MJ-VIDEO)."""
    return [i * (num_frames - 1) // n for i in range(n)]


def parts(num_frames: int, n: int) -> list[int]:
    """Return the first frames of n equal parts of the whole video (UnifiedReward)."""
    return [i * num_frames // n for i in range(n)]


def pad_to_square(frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 s s"]:
    """Pad to a square around the centre with CLIP's mean colour."""
    h, w = frames.shape[-2:]
    size = max(h, w)
    levels = [int(255 * mean) / 255 for mean in CLIP_MEAN]
    colour = torch.tensor(levels).to(frames)[None, :, None, None]
    square = colour.repeat(len(frames), 1, size, size)
    top, left = (size - h) // 2, (size - w) // 2
    square[..., top : top + h, left : left + w] = frames
    return square

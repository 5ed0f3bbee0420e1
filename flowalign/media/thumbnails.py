"""Clips on a page: a small picture that moves, and a strip of some of its frames."""

import io
import itertools
import math

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

LONGEST, MOST_FRAMES = 192, 48
"""Of a clip on a page: pixels of the longer side, and frames."""
UNKNOWN_RATE = 8.0
"""Frames per second at which a page plays a clip of unknown rate."""
EXACT = 64
"""Longer side in pixels of a clip, up to which it is stored without loss."""


def bytes_of(frames: Float[Tensor, "*f 3 H W"]) -> UInt8[Tensor, "*f 3 H W"]:
    """RGB in [0, 1] as 8 bits, rounded."""
    return (frames.float().clamp(0, 1) * 255).round().byte()


def pictures(pixels: UInt8[Tensor, "F 3 H W"], side: int) -> list[Image.Image]:
    """Every frame, scaled so that its longer side has `side` pixels."""
    scale = side / max(pixels.shape[-2:])
    height, width = (max(1, round(n * scale)) for n in pixels.shape[-2:])
    kind = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
    frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in pixels]
    return frames if scale == 1 else [frame.resize((width, height), kind) for frame in frames]


def looping(pixels: UInt8[Tensor, "F 3 H W"], fps: float, side: int | None = None) -> bytes:
    """An animated WebP that plays for ever, its longer side scaled to `side` pixels.

    Small frames lose nothing by it. Equal frames in a row are stored as one that lasts longer.
    """
    longer = max(pixels.shape[-2:])
    first, *others = pictures(pixels, side or longer)
    ends = [round(1000 * i / fps) for i in range(len(pixels) + 1)]
    lasting = [end - start for start, end in itertools.pairwise(ends)]
    content = io.BytesIO()
    first.save(
        content, "WEBP", save_all=True, append_images=others, duration=lasting, loop=0,
        lossless=longer <= EXACT, quality=70,
    )  # fmt: skip
    return content.getvalue()


def first_to_last(num_frames: int, most: int) -> list[int]:
    """At most so many frames at equal distances, the first and the last among them."""
    if num_frames <= most:
        return list(range(num_frames))
    return torch.linspace(0, num_frames - 1, most).round().long().tolist()


def thinned(num_frames: int, fps: float, most: int) -> tuple[list[int], float]:
    """At most so many frames, every n-th one, and the rate at which they last as long."""
    step = math.ceil(num_frames / most)
    return list(range(0, num_frames, step)), fps / step


def reduced(frames: Float[Tensor, "F 3 H W"], longest: int) -> Float[Tensor, "F 3 h w"]:
    """Averaged over areas where the longer side has more pixels than `longest`."""
    ratio = longest / max(frames.shape[-2:])
    if ratio >= 1:
        return frames
    size = [max(1, round(side * ratio)) for side in frames.shape[-2:]]
    return torch.nn.functional.interpolate(frames.float(), size, mode="area")

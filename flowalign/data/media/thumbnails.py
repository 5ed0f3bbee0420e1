"""Make thumbnails of clips for web pages: small looping animations and strips of frames."""

import io
import itertools
import math

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

LONGEST, MOST_FRAMES = 192, 48
"""Limits of a clip on a web page: pixels of the longer side, and number of frames."""
UNKNOWN_RATE = 8.0
"""Frames per second at which a web page plays a clip of unknown rate."""
THUMBNAIL, THUMBNAIL_FRAMES = 160, 24
"""Longer side of a thumbnail in pixels, and largest number of its frames."""
EXACT = 64
"""Largest length in pixels of the longer side for lossless storage of a clip."""


def to_bytes(frames: Float[Tensor, "*f 3 H W"]) -> UInt8[Tensor, "*f 3 H W"]:
    """Convert RGB in [0, 1] to 8 bits, rounded."""
    return (frames.float().clamp(0, 1) * 255).round().byte()


def to_images(pixels: UInt8[Tensor, "F 3 H W"], side: int) -> list[Image.Image]:
    """Return every frame as an image, resized to `side` pixels on its longer side."""
    scale = side / max(pixels.shape[-2:])
    height, width = (max(1, round(n * scale)) for n in pixels.shape[-2:])
    kind = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
    frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in pixels]
    return frames if scale == 1 else [frame.resize((width, height), kind) for frame in frames]


def encode_loop(pixels: UInt8[Tensor, "F 3 H W"], fps: float, side: int | None = None) -> bytes:
    """Return a looping animated WebP with its longer side scaled to `side` pixels.

    Frames of up to `EXACT` pixels are stored losslessly. Repeated frames are stored as one longer
    frame.
    """
    longer = max(pixels.shape[-2:])
    first, *others = to_images(pixels, side or longer)
    ends = [round(1000 * i / fps) for i in range(len(pixels) + 1)]
    lasting = [end - start for start, end in itertools.pairwise(ends)]
    content = io.BytesIO()
    first.save(
        content,
        "WEBP",
        save_all=True,
        append_images=others,
        duration=lasting,
        loop=0,
        lossless=longer <= EXACT,
        quality=70,
    )
    return content.getvalue()


def encode_thumbnail(pixels: UInt8[Tensor, "F 3 H W"], fps: float | None) -> bytes:
    """Return a WebP with its longer side scaled to `THUMBNAIL` pixels, a loop for a video."""
    if len(pixels) > 1:
        return encode_loop(pixels, fps or UNKNOWN_RATE, THUMBNAIL)
    content = io.BytesIO()
    to_images(pixels, THUMBNAIL)[0].save(content, "WEBP", quality=85)
    return content.getvalue()


def spread_frames(num_frames: int, most: int) -> list[int]:
    """Return the indices of at most `most` evenly spaced frames, with the first and the last."""
    if num_frames <= most:
        return list(range(num_frames))
    return torch.linspace(0, num_frames - 1, most).round().long().tolist()


def thin_frames(num_frames: int, fps: float, most: int) -> tuple[list[int], float]:
    """Return the indices of every n-th frame, at most `most`, and the frame rate for them."""
    step = math.ceil(num_frames / most)
    return list(range(0, num_frames, step)), fps / step


def reduce_size(frames: Float[Tensor, "F 3 H W"], longest: int) -> Float[Tensor, "F 3 h w"]:
    """Downscale frames by area averaging if their longer side exceeds `longest` pixels."""
    ratio = longest / max(frames.shape[-2:])
    if ratio >= 1:
        return frames
    size = [max(1, round(side * ratio)) for side in frames.shape[-2:]]
    return torch.nn.functional.interpolate(frames.float(), size, mode="area")

"""Convert images and frames of videos to RGB in 8 bits as viewers show them, and to thumbnails.

Viewers show them rotated and without transparency. Thumbnails for web pages are small looping
animations and strips of frames.
"""

import io
import itertools
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, UnidentifiedImageError
from PIL.AvifImagePlugin import AvifImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from flowalign.utils.media.media import Media, MediaProblem

# Pillow raises any of these errors for broken files, depending on the format.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError, TypeError)
_BROKEN += (AttributeError, RuntimeError, struct.error)
_MOST_PIXELS = 1 << 27
"""Largest image that is read. A small file can declare more pixels than memory holds."""
_SQUARE = 0.02
"""Largest deviation of a pixel's aspect ratio from 1 that comes from rounded sides."""
_HDR = {16: "PQ", 18: "HLG"}
"""Transfer functions of HDR videos by their codes in video headers."""
_ORIENTATION = 0x0112
"""EXIF tag of the orientation of an image."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition of an image by its EXIF orientation; 5 to 8 swap its sides."""


@contextmanager
def explain_damage(name: str, kind: str = "image") -> Iterator[None]:
    """Raise MediaProblem for any error of Pillow or FFmpeg in the block."""
    try:
        yield
    except MediaProblem:
        raise
    except UnidentifiedImageError as error:
        raise MediaProblem(f"unreadable image: {name} has an unknown format") from error
    except Image.DecompressionBombError as error:
        raise MediaProblem(f"too large image: {name} ({error})") from error
    except MemoryError as error:
        raise MediaProblem(f"too large {kind}: {name} needs more memory than there is") from error
    except _BROKEN as error:
        raise MediaProblem(f"truncated or damaged {kind}: {name} ({error})") from error


@contextmanager
def open_picture(
    source: Any, name: str, formats: tuple[str, ...] | None = None
) -> Iterator[Image.Image]:
    """Open an image, of any format if `formats` is None; its pixels are decoded later.

    Raises:
        MediaProblem: The file is damaged, too large or of another format.
    """
    with explain_damage(name):
        image = Image.open(source, formats=formats)
    with image:
        if image.width * image.height > _MOST_PIXELS:
            size = f"{image.width} x {image.height} pixels"
            raise MediaProblem(f"too large image: {name} has {size}; up to {_MOST_PIXELS} are read")
        yield image


def count_frames(image: Image.Image) -> int:
    """Return the number of frames of an opened image; pages and views of one moment count as 1."""
    animated = isinstance(image, WebPImageFile | PngImageFile | AvifImageFile)
    return image.n_frames - skip_default(image) if animated else 1


def skip_default(image: Image.Image) -> int:
    """Return the index of the first frame: 1 if a PNG begins with a still image, otherwise 0."""
    return int(image.info.get("default_image", False))


def read_upright_size(image: Image.Image, name: str) -> tuple[int, int]:
    """Return the width and height that `to_rgb` gives, without decoding the pixels."""
    width, height = image.size
    if image.format == "TIFF":  # Pillow rotates it when it loads the pixels, and states that size
        return width, height
    with explain_damage(name):
        # The method of PNG files would decode the pixels, to find EXIF data behind them.
        orientation = Image.Image.getexif(image).get(_ORIENTATION)
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def turn_upright(image: Image.Image) -> Image.Image:
    """Rotate an image by its EXIF orientation; other EXIF data are not read, as they may be bad."""
    image.load()  # removes the orientation of a TIFF file, which it applies
    turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image, name: str, background: str = "white") -> UInt8[np.ndarray, "h w 3"]:
    """Return the pixels of an image as viewers show it, on `background`.

    Raises:
        MediaProblem: The image is damaged, or its pixel values have no known range.
    """
    with explain_damage(name):
        upright = turn_upright(image)
        if upright.mode.startswith("I;16"):
            values = np.asarray(upright)
            alpha = np.where(values == upright.info.get("transparency"), 0, 255)
            grey = (values.astype(np.float32) / 257).round()
            upright = Image.fromarray(np.stack([grey, alpha], -1).astype(np.uint8))
        elif upright.mode in ("I", "F"):
            raise MediaProblem(f"unreadable image: {name} has pixel values of unknown range")
        return np.array(flatten(upright, background))


def flatten(image: Image.Image, background: str = "white") -> Image.Image:
    """Return an image in RGB, composited on `background` if it has transparency."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    behind = Image.new("RGBA", image.size, background)
    return Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")


class _Turn(NamedTuple):
    """Rotation: swap rows and columns if `swapped`, then apply the step (1 or -1) of each axis."""

    swapped: bool = False
    down: int = 1
    right: int = 1


class Orientation:
    """Conversion of the frames of one clip to RGB, rotated by the display matrix of the first.

    Frames with pixels that are not square are scaled in width.

    Two traps: PyAV frees a frame only at garbage collection once its side data was read, so only
    the first frame's side data is read. Frames must not convert themselves, because after a fork
    the threads of their converter deadlock.
    """

    def __init__(self, medium: Media, stream: Any):
        """Prepare for the stream of the clip `medium`; av must be installed.

        Raises:
            MediaProblem: The video is HDR, which looks grey without tone mapping.
        """
        from av.video.reformatter import VideoReformatter

        if kind := _HDR.get(stream.codec_context.color_trc):
            remedy = f"has the brightness of {kind}; convert it to SDR"
            raise MediaProblem(f"HDR video: {medium.name} {remedy}")
        self.medium = medium
        aspect = float(stream.sample_aspect_ratio or 1)
        self._aspect = 1.0 if abs(aspect - 1) < _SQUARE else aspect
        self._converter = VideoReformatter()
        self._turn: _Turn | None = None

    def show(self, frame: Any) -> np.ndarray:
        """Return a frame as [height, width, RGB].

        Raises:
            MediaProblem: The rotation is not a multiple of 90 degrees.
        """
        self._turn = self._turn or _read_turn(frame, self.medium.name)
        transparent = any(one.is_alpha for one in frame.format.components)
        colours = "rgba" if transparent else "rgb24"
        width = round(frame.width * self._aspect)
        if width * frame.height > _MOST_PIXELS:
            raise MediaProblem(f"too large video: {self.medium.name} is {width} x {frame.height}")
        pixels = self._converter.reformat(frame, width=width, format=colours).to_ndarray()
        if transparent:
            pixels = np.asarray(flatten(Image.fromarray(pixels), self.medium.background))
        pixels = pixels.transpose(1, 0, 2) if self._turn.swapped else pixels
        return pixels[:: self._turn.down, :: self._turn.right]


def _read_turn(frame: Any, name: str) -> _Turn:
    """Read the rotation from the display matrix of a frame.

    The matrix [[a, b], [c, d]] maps a point (x, y), y down, to (a x + c y, b x + d y).
    """
    # PyAV 18 iterates over the side data and PyAV 19 over its types; look-ups work in both.
    if (matrix := frame.side_data.get("DISPLAYMATRIX")) is None:
        return _Turn()
    a, b, c, d = np.sign(np.frombuffer(bytes(matrix), np.int32)[[0, 1, 3, 4]]).tolist()
    if [abs(value) for value in (a, b, c, d)] not in ([1, 0, 0, 1], [0, 1, 1, 0]):
        raise MediaProblem(f"rotated by an unsupported angle: {name}")
    return _Turn(b != 0, b + d, a + c)


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


def to_images(pixels: UInt8[Tensor, "F 3 H W"], side: int | None = None) -> list[Image.Image]:
    """Return every frame as an image; with `side` its longer side becomes `side` pixels."""
    scale = side / max(pixels.shape[-2:]) if side else 1
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

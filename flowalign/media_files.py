"""Pictures and videos as tensors, from a path or from bytes."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from flowalign.records import VIDEOS, Media


class MediaProblem(ValueError):
    """Why a file gives no frames: what kind of problem, a colon, and the details."""


@dataclass(frozen=True)
class Clip:
    """Decoded frames in 8 bits, a quarter of their size in floating point."""

    pixels: UInt8[Tensor, "F 3 H W"]
    fps: float | None = None
    """Frames per second of these frames; None for a picture."""

    @property
    def frames(self) -> Float[Tensor, "F 3 H W"]:
        """RGB in [0, 1]."""
        return self.pixels.float() / 255


def decode(medium: Media, max_frames: int | None = None) -> Clip:
    """All frames of a video, or so many evenly spaced ones; a picture is one frame.

    A picture is turned as its EXIF data say, and loses its transparency.

    Raises:
        MediaProblem: the file is missing, truncated, empty or of an unknown kind.
        ValueError: it is a video, and av is not installed.
    """
    path = Path(medium.path) if medium.path else None
    if path and not path.is_file():
        raise MediaProblem(f"missing file: {path}")
    source = path or io.BytesIO(medium.data or b"")
    name = str(path) if path else f"{len(medium.data or b'')} bytes"
    if path is None or path.suffix.lower() not in VIDEOS:
        try:
            return Clip(_picture(source, name))
        except UnidentifiedImageError as error:
            if path or not _looks_like_video(medium.data or b""):
                raise MediaProblem(f"unreadable picture: {name} is of no known kind") from error
    return _video(source, name, medium.fps, max_frames)


def _picture(source: Path | io.BytesIO, name: str) -> UInt8[Tensor, "1 3 H W"]:
    try:
        with Image.open(source) as image:
            if image.mode.startswith("I;16"):
                grey = np.asarray(image).astype(np.float32) / 257
                upright = Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
            elif image.mode in ("I", "F"):
                raise MediaProblem(f"unreadable picture: {name} has values of unknown range")
            else:
                upright = ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaProblem(f"truncated or damaged picture: {name} ({error})") from error
    return torch.from_numpy(np.array(upright)).permute(2, 0, 1)[None].contiguous()


def _looks_like_video(data: bytes) -> bool:
    """MP4 and relatives, Matroska, AVI."""
    return data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3" or data[8:12] == b"AVI "


def _video(source: Path | io.BytesIO, name: str, fps: float | None, most: int | None) -> Clip:
    total = _count(source, name) if most else 0
    wanted = _evenly(total, most) if most and total > most else None
    frames = []
    with _opened(source, name) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate) if stream.average_rate else fps
        for i, frame in enumerate(container.decode(stream)):
            if wanted is None or i in wanted:
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
    if not frames:
        raise MediaProblem(f"no frames: {name}")
    if rate and wanted:
        rate *= len(wanted) / total
    return Clip(torch.stack(frames).permute(0, 3, 1, 2).contiguous(), rate)


def _evenly(total: int, count: int) -> set[int]:
    """The middle of each of `count` equal parts."""
    return {int((i + 0.5) * total / count) for i in range(count)}


def _count(source: Path | io.BytesIO, name: str) -> int:
    """Frames of a video, without decoding them."""
    with _opened(source, name) as container:
        return sum(1 for packet in container.demux(video=0) if packet.size)


@contextmanager
def _opened(source: Path | io.BytesIO, name: str) -> Iterator[Any]:
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need av: pip install 'flowalign[video]'") from error
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with av.open(source if isinstance(source, io.BytesIO) else str(source)) as container:
            if not container.streams.video:
                raise MediaProblem(f"no frames: {name} has no video stream")
            yield container
    except av.FFmpegError as error:
        raise MediaProblem(f"truncated or damaged video: {name} ({error.strerror})") from error

"""Decode images and videos to tensors, from a path or from bytes."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from flowalign.data.media.digests import digest_media, list_frame_files
from flowalign.data.media.frame_sampling import (
    FrameSelection,
    MediaProblem,
    TimedFrame,
    estimate_rate,
)
from flowalign.data.media.media import VIDEOS, Media, describe_missing
from flowalign.data.media.orientation import Orientation

__all__ = [
    "FrameSelection",
    "Clip",
    "MediaProblem",
    "decode",
    "digest_media",
    "list_frame_files",
    "is_video",
    "find_video_stream",
    "count_frames",
]
_ROUNDING = 2e-3
"""Tolerance in seconds, because video headers round to milliseconds."""


@dataclass(frozen=True)
class Clip:
    """Decoded frames in 8 bits, which take a quarter of the memory of float32."""

    pixels: UInt8[Tensor, "F 3 H W"]
    fps: float | None = None
    """Frames per second of `pixels`; None for an image or if unknown."""

    @property
    def frames(self) -> Float[Tensor, "F 3 H W"]:
        """Return the frames as RGB in [0, 1]."""
        return self.pixels.float() / 255


def decode(
    medium: Media,
    max_frames: int | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
) -> Clip:
    """Decode all frames of a video, or the frames that a `FrameSelection` of the options selects.

    An image is one frame. A folder of images is a clip in natural order of the file names, with
    `medium.fps` frames per second. A video's own rate overrides `medium.fps`; it is the mean rate
    if frames are unevenly spaced. Images are rotated by their EXIF data and lose transparency.
    Videos are rotated by their display matrix.

    Raises:
        MediaProblem: The file is missing, damaged, empty or of an unknown kind, or lacks requested
            frames. Frames are never repeated or invented.
        ValueError: The file is a video and av is not installed.
    """
    choice = FrameSelection(max_frames, fps, num_frames)
    path = Path(medium.path) if medium.path else None
    if path and path.is_dir():
        return _decode_folder(path, medium.fps, choice)
    if path and not path.is_file():
        raise MediaProblem(describe_missing(path))
    source = path or io.BytesIO(medium.data or b"")
    name = str(path) if path else f"{len(medium.data or b'')} bytes"
    if is_video(medium):
        return _decode_video(source, name, medium.fps, choice)
    return _decode_picture(source, name, medium.fps, choice)


def is_video(medium: Media) -> bool:
    """Return whether a file is a video, by its name or first bytes; otherwise it is an image."""
    if medium.path:
        return Path(medium.path).suffix.lower() in VIDEOS
    return _looks_like_video(medium.data or b"")


def _looks_like_video(data: bytes) -> bool:
    """Return whether bytes begin like MP4 and related formats, Matroska, GIF or AVI."""
    return data[4:8] == b"ftyp" or data[:4] in (b"\x1aE\xdf\xa3", b"GIF8") or data[8:12] == b"AVI "


def _stack_frames(
    name: str,
    shown: Iterable[TimedFrame],
    total: int,
    choice: FrameSelection,
    pixels: Callable[[Any], np.ndarray],
    stated: float | None = None,
    tick: float = 0.0,
) -> Clip:
    """Stack the frames that `choice` selects; `pixels` is called for selected frames only."""
    seconds: list[float] = []

    def noted() -> Iterator[TimedFrame]:
        for one in shown:
            seconds.append(one.second)
            yield one

    arrays = [pixels(frame) for _, frame in choice.of(noted(), total, name)]
    if not arrays:
        raise MediaProblem(f"no frames: {name}")
    if len(sizes := {array.shape for array in arrays}) > 1:
        both = " and ".join(f"{width} x {height}" for height, width, _ in sorted(sizes)[:2])
        raise MediaProblem(f"frames of different sizes: {name} has some of {both}")
    rate = choice.rate(estimate_rate(seconds, stated, tick), total)
    return Clip(torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous(), rate)


# Images -------------------------------------------------------------------------------------------


def _decode_picture(
    source: Path | io.BytesIO, name: str, fps: float | None, choice: FrameSelection
) -> Clip:
    """Decode an image, or all frames of an animated WebP."""
    with _open_picture(source, name) as image:
        frames = ImageSequence.all_frames(image) if count_frames(image) > 1 else [image]
        lasting = [frame.info.get("duration", 0) / 1000 for frame in frames]
        starts = np.cumsum([0.0, *lasting])
        known = starts[-1] > 0
        shown = [
            TimedFrame(float(starts[i]) if known else np.nan, frame)
            for i, frame in enumerate(frames)
        ]
        stated = len(frames) / float(starts[-1]) if known else fps
        return _stack_frames(
            name,
            shown,
            len(frames),
            choice,
            lambda frame: _turn_upright(frame, name),
            stated if len(frames) > 1 else None,
        )


def count_frames(image: Image.Image) -> int:
    """Return the number of frames of an opened image; 1 for formats other than WebP."""
    return image.n_frames if isinstance(image, WebPImageFile) else 1


def _decode_folder(folder: Path, fps: float | None, choice: FrameSelection) -> Clip:
    """Decode a folder with one file per frame; one broken file makes the whole clip unusable."""
    paths = list_frame_files(folder)
    shown = (TimedFrame(i / fps if fps else np.nan, path) for i, path in enumerate(paths))

    def pixels(path: Path) -> np.ndarray:
        with _open_picture(path, str(path)) as image:
            return _turn_upright(image, str(path))

    return _stack_frames(str(folder), shown, len(paths), choice, pixels, fps)


@contextmanager
def _open_picture(source: Path | io.BytesIO, name: str) -> Iterator[Image.Image]:
    try:
        with Image.open(source) as image:
            yield image
    except UnidentifiedImageError as error:
        raise MediaProblem(f"unreadable image: {name} has an unknown format") from error
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise MediaProblem(f"truncated or damaged image: {name} ({error})") from error


def _turn_upright(image: Image.Image, name: str) -> np.ndarray:
    if image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.float32) / 257
        image = Image.fromarray(grey.round().astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise MediaProblem(f"unreadable image: {name} has pixel values of unknown range")
    else:
        image = ImageOps.exif_transpose(image)
    return np.array(image.convert("RGB"))


# Videos -------------------------------------------------------------------------------------------


def _decode_video(
    source: Path | io.BytesIO, name: str, fps: float | None, choice: FrameSelection
) -> Clip:
    # Headers may state a wrong number of frames, or none: count packets, which decodes nothing.
    total = _count_packets(source, name) if choice.max_frames else 0
    with _open_video(source, name) as (container, stream):
        # FFmpeg reads a GIF that was cut short without an error.
        if container.format.name == "gif" and not _ends_with(source, b";"):
            raise MediaProblem(f"truncated or damaged video: {name} has no end marker")
        stated = float(stream.average_rate) if stream.average_rate else fps
        return _stack_frames(
            name,
            _iterate_frames(container, stream, stated, name),
            total,
            choice,
            Orientation(name).show,
            stated,
            float(stream.time_base or 0),
        )


def _iterate_frames(
    container: Any, stream: Any, rate: float | None, name: str
) -> Iterator[TimedFrame]:
    """Yield frames with their times in seconds; without timestamps, evenly spaced at `rate`.

    Decoders do not report damage: they skip damaged data or stop early without an error. Corrupt
    frames and a missing end are therefore detected here.
    """
    before = second = lasting = 0.0
    for i, frame in enumerate(container.decode(stream)):
        if frame.is_corrupt:
            raise MediaProblem(f"truncated or damaged video: {name} (frame {i + 1} is damaged)")
        even = i / rate if rate else np.nan
        before, second = second, even if frame.time is None else frame.time
        lasting = float(frame.duration * (frame.time_base or 0))
        yield TimedFrame(second, frame)
    alone = container.duration if len(container.streams) == 1 else None
    interval = max(lasting, second - before, 1 / rate if rate else 0)
    end = second + interval
    if alone and alone / 1e6 - end > max(interval / 2, _ROUNDING):
        where = f"ends after {end:.3f} of {alone / 1e6:.3f} s"
        raise MediaProblem(f"truncated or damaged video: {name} ({where})")


def _count_packets(source: Path | io.BytesIO, name: str) -> int:
    """Count the frames of a video without decoding them."""
    with _open_video(source, name) as (container, stream):
        return sum(1 for packet in container.demux(stream) if packet.size)


def _ends_with(source: Path | io.BytesIO, trailer: bytes) -> bool:
    """Return whether a file ends with `trailer`, ignoring the padding that some programs append."""
    data = source.getvalue() if isinstance(source, io.BytesIO) else source.read_bytes()
    return data.rstrip(b"\0\r\n\t ").endswith(trailer)


@contextmanager
def _open_video(source: Path | io.BytesIO, name: str) -> Iterator[tuple[Any, Any]]:
    """Open a container and yield it with its first video stream."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need av: pip install 'flowalign[video]'") from error
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with av.open(source if isinstance(source, io.BytesIO) else str(source)) as container:
            yield container, find_video_stream(container, name)
    except av.FFmpegError as error:
        raise MediaProblem(f"truncated or damaged video: {name} ({error.strerror})") from error


def find_video_stream(container: Any, name: str) -> Any:
    """Return the first video stream except cover art; raise MediaProblem if there is none."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise MediaProblem(f"no frames: {name} has no video stream")

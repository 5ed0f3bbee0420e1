"""Define `Media`, a stored image or video; hash and check its files, and select its frames."""

import hashlib
import io
import itertools
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from flowalign.utils.files import digest_file

_JPEG = {".jpg", ".jpeg", ".jpe", ".jfif"}
PICTURES = frozenset({".png", *_JPEG, ".webp", ".avif", ".bmp", ".tif", ".tiff"})
VIDEOS = frozenset({".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v", ".gif"})
"""File name extensions of videos; `PICTURES` has the extensions of images."""


@dataclass(frozen=True)
class Media:
    """Image or video, identified by a path, by the bytes of a file, or only by a digest."""

    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    fps: float | None = None
    """Frames per second, for files that do not state it; or None."""
    digest: str | None = None
    """SHA-256 of the file in hexadecimal; None until the file has been read."""
    background: str = field(default="white", compare=False)
    """Colour behind transparent pixels. Masks have black, which means unchanged."""

    @property
    def source(self) -> str | io.BytesIO:
        """Path, or file in memory, as decoders open it."""
        return self.path or io.BytesIO(self.data or b"")

    @property
    def name(self) -> str:
        """Path, or number of bytes, for messages."""
        return self.path or f"{len(self.data or b'')} bytes"


@dataclass(frozen=True)
class Sound:
    """Sound of one clip."""

    waveform: Float[Tensor, "C S"]
    """Amplitudes in [-1, 1], one row per channel."""
    rate: int
    """Amplitudes per second."""


def describe_missing(path: Path) -> str:
    """Return the problem of a path without a file, as "kind: details"."""
    if path.is_symlink():
        return f"broken link: {path} points to {path.readlink()}"
    if path.exists():
        return f"no regular file: {path}"
    for form in ("NFC", "NFD"):
        if os.path.exists(other := unicodedata.normalize(form, str(path))):
            return f"missing file: {path}, but {other} exists, with accents in the form {form}"
    return f"missing file: {path}"


def require_file(path: Path) -> int:
    """Return the size of a file; raise MediaProblem if it is missing or not regular."""
    if not path.is_file():
        raise MediaProblem(describe_missing(path))
    return path.stat().st_size


def list_frame_files(folder: Path) -> list[Path]:
    """List a folder's images in natural order of names; raise MediaProblem if it has none."""
    paths = sorted(
        (path for path in folder.iterdir() if path.suffix.lower() in PICTURES),
        key=lambda path: [
            (int(part), "") if part.isdecimal() else (-1, part)
            for part in re.split(r"(\d+)", path.name)
        ],
    )
    if not paths:
        raise MediaProblem(f"no frames: {folder} has no images")
    return paths


def stamp_media(medium: Media) -> str:
    """Return a text that changes with a medium: its digest, or the state of its files.

    Files are not read: the state is their paths, sizes and times of change.
    """
    if medium.path is None:
        return digest_media(medium).hex()
    path = Path(medium.path).absolute()
    states = []
    with suppress(OSError, MediaProblem):  # a missing file may appear later
        for file in list_frame_files(path) if path.is_dir() else [path]:
            state = file.stat()
            states.append((file.name, state.st_size, state.st_mtime_ns))
    return f"{path} {states}"


def digest_media(medium: Media) -> bytes:
    """Return the SHA-256 of a file, or of the names and contents of a folder's frames in order.

    Raises:
        MediaProblem: `medium` has neither a path nor data, or its folder has no frames.
        OSError: A file cannot be read.
    """
    if medium.path is None:
        if medium.data is None:
            raise MediaProblem("the media item has neither a path nor data")
        return hashlib.sha256(medium.data).digest()
    path = Path(medium.path)
    if not path.is_dir():
        return bytes.fromhex(digest_file(path))
    whole = hashlib.sha256()
    for file in list_frame_files(path):
        whole.update(
            hashlib.sha256(os.fsencode(file.name)).digest() + bytes.fromhex(digest_file(file))
        )
    return whole.digest()


_MATROSKA = (b"\x1aE\xdf\xa3", b"\x18S\x80g")
"""Identifiers of the header and of the segment in Matroska and WebM files."""


def is_cut(file: io.BufferedIOBase) -> bool:
    """Return whether a file ends inside an MP4 box, a Matroska segment or an AVI chunk.

    Files without a stated length, such as live recordings, count as complete.
    """
    size, end, length = file.seek(0, os.SEEK_END), 0, 1
    while end < size and length:
        file.seek(end)
        end += (length := _measure(file.read(16)))
    return end > size


def _measure(head: bytes) -> int:
    """Return the number of bytes of the part of a file that begins with `head`; 0 if unknown."""
    if head.startswith(b"RIFF"):
        return 8 + int.from_bytes(head[4:8], "little")
    if head.startswith(_MATROSKA):
        width = 9 - head[4].bit_length()
        largest = (1 << 7 * width) - 1
        length = int.from_bytes(head[4 : 4 + width]) & largest
        return 0 if length == largest else 4 + width + length
    length = int.from_bytes(head[:4]) if head[4:8].isalpha() else 0
    return int.from_bytes(head[8:]) if length == 1 else length


def has_gif_end(data: bytes) -> bool:
    """Return whether the blocks of a GIF reach its end marker, which other bytes may follow."""
    place = 13 + _measure_palette(data[10:11])
    while place < len(data) and data[place] != ord(";"):
        if data[place] == ord(","):  # an image
            place += 11 + _measure_palette(data[place + 9 : place + 10])
        elif data[place] == ord("!"):  # an extension
            place += 2
        else:
            return False
        while place < len(data) and data[place]:
            place += data[place] + 1
        place += 1
    return place < len(data)


def _measure_palette(flags: bytes) -> int:
    return 6 << (flags[0] & 7) if flags and flags[0] & 128 else 0


_CLOSE = 1e-6
"""Tolerance in seconds; if two frames are equally near to a requested time, take the earlier."""


class MediaProblem(ValueError):
    """Reason why a file gives no frames, as "kind: details"."""


class TimedFrame(NamedTuple):
    """Frame with its time in seconds, NaN if unknown."""

    second: float
    frame: Any


@dataclass(frozen=True)
class FrameSelection:
    """Selection of frames of a clip; all frames if no option is set."""

    max_frames: int | None = None
    """Largest number of evenly spaced frames; None: no limit."""
    fps: float | None = None
    """Frames per second: the frames nearest to 0, 1 / fps, 2 / fps, ... seconds after the first,
    each at most once; None: the rate of the clip."""
    num_frames: int | None = None
    """Exact number of frames to take from the start; None: all."""

    def __post_init__(self) -> None:
        """Raise ValueError for combinations and values that no clip can satisfy."""
        if self.max_frames and (self.fps or self.num_frames):
            raise ValueError("max_frames cannot be combined with fps or num_frames")
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0")

    def of(self, shown: Iterable[TimedFrame], total: int, name: str) -> Iterator[TimedFrame]:
        """Yield the selected frames of `shown`; `total` is only used with `max_frames`.

        Raises:
            MediaProblem: A selected frame is missing; raised when iteration reaches it. The message
                contains `name`.
        """
        if self.fps:
            shown = sample_at_rate(shown, self.fps, name)
        if self.max_frames and total > self.max_frames:
            middles = {int((i + 0.5) * total / self.max_frames) for i in range(self.max_frames)}
            shown = (one for i, one in enumerate(shown) if i in middles)
        yield from take_exactly(shown, self.num_frames, name) if self.num_frames else shown

    def rate(self, fps: float | None, total: int) -> float | None:
        """Return the frames per second of the selection from a clip with `fps` and `total`."""
        if self.fps or not fps:
            return self.fps
        return fps * min(self.max_frames, total) / total if self.max_frames else fps


def sample_at_rate(shown: Iterable[TimedFrame], fps: float, name: str) -> Iterator[TimedFrame]:
    """Yield the frames nearest to 0, 1 / fps, 2 / fps, ... seconds after the first.

    Raises:
        MediaProblem: The times are unknown, or a frame would be taken twice.
    """
    start, before, used, count, shown_so_far = 0.0, None, -math.inf, 0, 0
    for one in shown:
        if math.isnan(one.second):
            raise MediaProblem(f"unknown rate: {name} has no timestamps and no frame rate")
        start = one.second if before is None else start
        before = before or one
        while (moment := start + count / fps) <= one.second + _CLOSE:
            nearest = one if one.second - moment < moment - before.second - _CLOSE else before
            if nearest.second <= used:
                raise MediaProblem(
                    f"too few frames: {name} has none between {before.second - start:.3f} and "
                    f"{one.second - start:.3f} s, but {fps:g} per second are needed: "
                    "remove the file, or set policy.video.fps to "
                    f"{1 / (one.second - before.second):g}"
                )
            yield nearest
            used, count = nearest.second, count + 1
        before, shown_so_far = one, shown_so_far + 1
    if before is None or shown_so_far < 2 or before.second <= used:
        return
    end = before.second + (before.second - start) / (shown_so_far - 1)
    if start + count / fps < end - _CLOSE:
        yield before


def take_exactly(shown: Iterable[TimedFrame], count: int, name: str) -> Iterator[TimedFrame]:
    """Yield the first `count` frames; raise MediaProblem if there are fewer."""
    there = 0
    for one in itertools.islice(shown, count):
        there += 1
        yield one
    if there < count:
        raise MediaProblem(f"too short: {name} has {there} of {count} frames")


def estimate_rate(seconds: Sequence[float], stated: float | None, tick: float) -> float | None:
    """Return the stated frame rate if the frame times agree with it, else the mean rate.

    Times agree if they differ by less than `tick`, the resolution of the timestamps.
    """
    span = seconds[-1] - seconds[0] if len(seconds) > 1 else 0.0
    if not span > 0:  # also true for NaN, that is, for unknown times
        return stated
    if stated and abs(span - (len(seconds) - 1) / stated) < max(tick, _CLOSE):
        return stated
    return (len(seconds) - 1) / span

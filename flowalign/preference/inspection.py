"""What is wrong with the media of a pair, found without decoding them."""

import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from flowalign.media_files import MediaProblem
from flowalign.preference.latent_files import is_latent, latent_shape
from flowalign.records import VIDEOS, Media

_SIDEWAYS = (5, 6, 7, 8)
_ORIENTATION = 0x0112
"""Of EXIF: values that turn a picture by a right angle."""
Shape = tuple[int, int, int]
"""Width, height, frames."""


@dataclass
class Inspection:
    """Looks at files once; of bytes nothing is kept."""

    _sizes: dict[str, int] = field(default_factory=dict)
    _digests: dict[str, bytes] = field(default_factory=dict)
    _shapes: dict[str, Shape | str] = field(default_factory=dict)

    def of_pair(self, chosen: Media, rejected: Media, mixed_shapes: bool = False) -> str:
        """Why these two cannot be a pair, empty where they can: what kind, a colon, details."""
        try:
            if self.same(chosen, rejected):
                return f"the media are equal: {_name(chosen)} and {_name(rejected)}"
            if mixed_shapes:
                return ""
            first, second = self.shape(chosen), self.shape(rejected)
        except MediaProblem as problem:
            return str(problem)
        if first[:2] != second[:2]:
            return f"the media differ in size: {_sides(first)} and {_sides(second)}"
        if first[2] != second[2]:
            return f"the media differ in frames: {first[2]} and {second[2]}"
        return ""

    def of_one(self, medium: Media) -> str:
        """Why a medium cannot be used, empty where it can."""
        try:
            self.shape(medium)
        except MediaProblem as problem:
            return str(problem)
        return ""

    def missing(self, *paths: str) -> str:
        """The first of these files that is not there; empty where all are."""
        try:
            for path in paths:
                self._size(Media(path))
        except MediaProblem as problem:
            return str(problem)
        return ""

    def same(self, first: Media, second: Media) -> bool:
        """Whether two media are one file, or of the same bytes; only equal sizes are read.

        Raises:
            MediaProblem: a file is missing.
        """
        sizes = self._size(first), self._size(second)
        if first.path and first.path == second.path:
            return True
        return sizes[0] == sizes[1] and self.digest(first) == self.digest(second)

    def digest(self, medium: Media) -> bytes:
        """A hash of the bytes."""
        if medium.path is None:
            return _hash(medium.data or b"")
        if medium.path not in self._digests:
            self._digests[medium.path] = _hash(Path(medium.path).read_bytes())
        return self._digests[medium.path]

    def shape(self, medium: Media) -> Shape:
        """Width, height and frames, as the file's header says.

        Raises:
            MediaProblem: the file is missing, or not a picture or a video.
        """
        if medium.path is None:
            return _shape(medium)
        if medium.path not in self._shapes:
            try:
                self._size(medium)
                self._shapes[medium.path] = _shape(medium)
            except MediaProblem as problem:
                self._shapes[medium.path] = str(problem)
        found = self._shapes[medium.path]
        if isinstance(found, str):
            raise MediaProblem(found)
        return found

    def _size(self, medium: Media) -> int:
        if medium.path is None:
            return len(medium.data or b"")
        if medium.path not in self._sizes:
            if not os.path.isfile(medium.path):
                raise MediaProblem(f"missing file: {medium.path}")
            self._sizes[medium.path] = os.path.getsize(medium.path)
        return self._sizes[medium.path]


def _shape(medium: Media) -> Shape:
    if medium.path and is_latent(medium):
        return latent_shape(medium.path)
    source = medium.path or io.BytesIO(medium.data or b"")
    if medium.path is None or Path(medium.path).suffix.lower() not in VIDEOS:
        try:
            return _picture(source)
        except UnidentifiedImageError as error:
            if medium.path:
                raise MediaProblem(
                    f"unreadable picture: {medium.path} is of no known kind"
                ) from error
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise MediaProblem(f"unreadable picture: {_name(medium)} ({error})") from error
    return _video(source, _name(medium))


def _picture(source: str | io.BytesIO) -> Shape:
    """As it is shown: `decode` turns it as its EXIF data say."""
    with Image.open(source) as image:
        width, height = image.size
        if image.format in ("JPEG", "MPO") and image.getexif().get(_ORIENTATION) in _SIDEWAYS:
            return height, width, 1
        return width, height, 1


def _video(source: str | io.BytesIO, name: str) -> Shape:
    """Frames are counted where the header does not tell their number."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need av: pip install 'flowalign[video]'") from error
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with av.open(source, "r") as container:
            if not container.streams.video:
                raise MediaProblem(f"no frames: {name} has no video stream")
            stream = container.streams.video[0]
            frames = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
            return stream.width, stream.height, frames
    except av.FFmpegError as error:
        raise MediaProblem(f"unreadable video: {name} ({error.strerror})") from error


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _sides(shape: Shape) -> str:
    return f"{shape[0]} x {shape[1]}"


def _name(medium: Media) -> str:
    return medium.path or f"{len(medium.data or b'')} bytes"

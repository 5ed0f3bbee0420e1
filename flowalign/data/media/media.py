"""Define `Media`, a stored image or video."""

import io
from dataclasses import dataclass, field
from pathlib import Path

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})


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


def describe_missing(path: Path) -> str:
    """Return the problem of a path without a file, as "kind: details"."""
    if path.is_symlink():
        return f"broken link: {path} points to {path.readlink()}"
    return f"missing file: {path}"

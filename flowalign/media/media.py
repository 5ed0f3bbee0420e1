"""TODO module docstring."""

from dataclasses import dataclass, field

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})


VIDEOS = frozenset({".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v", ".gif"})
"""Endings of file names."""


@dataclass(frozen=True)
class Media:
    """An image or a video as it is stored: a path, or the bytes of a file; or which one it was."""

    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    fps: float | None = None
    """Frames per second where the file does not say it."""
    digest: str | None = None
    """SHA-256 of the file in hexadecimal, once somebody has read it."""

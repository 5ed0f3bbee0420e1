"""Decode and encode images and videos, select frames, and make thumbnails."""

from flowalign.data.media.media import Media

__all__ = [
    "Media",
]

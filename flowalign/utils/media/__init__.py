"""Decode and encode images and videos, select frames, and make thumbnails."""

from flowalign.utils.media.media import Media

__all__ = [
    "Media",
]

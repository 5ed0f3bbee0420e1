"""Media: files to tensors and back, frames of clips, and pictures of them."""

from flowalign.data.media.media import Media

__all__ = [
    "Media",
]

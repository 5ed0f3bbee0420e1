"""Read references of requests: images and clips, identified by content and decoded on demand."""

from functools import cache, lru_cache, partial
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from flowalign.data.media.decode import Clip, MediaProblem, decode, digest_media
from flowalign.data.media.digests import stamp_media
from flowalign.data.media.media import Media, describe_missing
from flowalign.functional.resizing import hole_within
from flowalign.types import Reference

_KEPT = 64
"""Number of decoded references in the cache; the samples of a group share references."""


def read_reference(medium: Media) -> Reference:
    """Return a reference to a file, a folder of frames or bytes; its pixels are not decoded yet.

    Raises:
        MediaProblem: The file does not exist.
    """
    if medium.path is None:
        content, name = digest_media(medium).hex(), f"{len(medium.data or b'')} bytes"
    else:
        path, name = Path(medium.path), medium.path
        if not path.exists():
            raise MediaProblem(describe_missing(path))
        content = _digest(name, stamp_media(medium))
    return Reference(name, content, partial(_read_pixels, medium, content))


def _read_pixels(medium: Media, content: str) -> Float[Tensor, "F 3 H W"]:
    return _decode_cached(medium, content + medium.background).frames


@lru_cache(maxsize=_KEPT)
def _decode_cached(medium: Media, _content_and_background: str) -> Clip:
    return decode(medium)


@cache
def _digest(path: str, _stamp: str) -> str:
    return digest_media(Media(path)).hex()


@cache
def shape_of(one: Reference) -> tuple[int, int, int]:
    """Return frames, height and width; raise MediaProblem if the file cannot be decoded."""
    frames, _, height, width = one.read().shape
    return frames, height, width


@cache
def has_hole(mask: Reference, crop: tuple[int, int] | None = None) -> bool:
    """Return whether a mask is white anywhere, or anywhere inside `crop` (height, width)."""
    pixels = mask.read()
    return bool(hole_within(pixels, *(crop or pixels.shape[-2:])).any())

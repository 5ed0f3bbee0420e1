"""Define `Record`, the schema-independent row of a preference dataset or scoring job."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.resizing import hole_within
from flowalign.types import Reference, Request
from flowalign.utils.media.decode import Clip, decode
from flowalign.utils.media.media import (
    Media,
    MediaProblem,
    describe_missing,
    digest_media,
    stamp_media,
)


@dataclass(frozen=True)
class Record:
    """Prompt with one item to score, or with several items that annotators compared.

    An item is an image or a video. Ranks, votes and ratings are stored per named dimension, with
    one entry per item. A dimension without a usable answer is absent.
    """

    id: str
    prompt: str
    media: Sequence[Media]
    references: Sequence[Media] = ()
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Rank of each item; 1 is best, equal ranks are a tie."""
    votes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Share of the votes for each item, in [0, 1] and summing to 1."""
    ratings: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Absolute human scores in the units of the dataset; higher is better."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    mask: Media | None = None
    """Inpainting mask: an image that is white where the first reference may change; or None."""
    both_bad: Sequence[str] = ()
    """Dimensions in which annotators judged all items bad; the ranks there are a tie."""
    problem: str = ""
    """Reason why the row cannot be used, with its number; empty if it can. A row with a problem may
    have no media."""

    def request(self) -> Request:
        """Return the request of the items, without metadata, because it describes the items.

        Raises:
            MediaProblem: A reference or the mask does not exist.
        """
        references = tuple(read_reference(medium) for medium in self.references)
        return Request(self.prompt, references, read_reference(self.mask) if self.mask else None)

    def stamp(self) -> str:
        """Return a hash that changes with the texts, labels and files of the record."""
        texts = replace(self, media=(), references=(), mask=None)
        files = self.media, self.references, [self.mask] if self.mask else []
        states = [[(medium.fps, stamp_media(medium)) for medium in media] for media in files]
        return hashlib.blake2b(repr((texts, states)).encode(), digest_size=16).hexdigest()


_KEPT = 64
"""Number of decoded references in the cache; the samples of a group share references."""


def read_reference(medium: Media) -> Reference:
    """Return a reference to a file, a folder of frames or bytes; its pixels are not decoded yet.

    Raises:
        MediaProblem: The file does not exist.
    """
    if medium.path and not Path(medium.path).exists():
        raise MediaProblem(describe_missing(Path(medium.path)))
    content = digest_media(medium).hex()
    return Reference(medium.name, content, partial(_read_pixels, medium, content))


def _read_pixels(medium: Media, content: str) -> Float[Tensor, "F 3 H W"]:
    return _decode_cached(medium, content + medium.background).frames


@lru_cache(maxsize=_KEPT)
def _decode_cached(medium: Media, _content_and_background: str) -> Clip:
    return decode(medium)


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

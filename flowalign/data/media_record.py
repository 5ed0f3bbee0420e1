"""Define `Record`, the schema-independent row of a preference dataset or scoring job."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowalign.data.media.digests import stamp_media
from flowalign.data.media.media import Media
from flowalign.data.media_references import read_reference
from flowalign.types import Request


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

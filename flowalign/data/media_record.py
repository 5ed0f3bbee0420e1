"""Defines `Record`: one row of a preference dataset or scoring job, whatever its schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowalign.data.media.media import Media
from flowalign.data.media_references import read_reference
from flowalign.types import Request


@dataclass(frozen=True)
class Record:
    """Holds a prompt with one medium to score, or with several that people compared.

    Every comparison is per named dimension and has one entry per medium. A dimension in which
    people gave no usable answer is absent.
    """

    id: str
    prompt: str
    media: Sequence[Media]
    references: Sequence[Media] = ()
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Rank of each medium: 1 is best, equal ranks are a tie."""
    votes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Share of the votes for each medium, in [0, 1] and summing to 1."""
    ratings: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Absolute human scores in the dataset's own units, higher is better."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    mask: Media | None = None
    """Mask of the request: a picture that is white where the first reference may change."""
    both_bad: Sequence[str] = ()
    """Dimensions in which people found all media bad; their ranks are a tie."""
    problem: str = ""
    """Why the row cannot be used, with its number; empty if it can. May come without media."""

    def request(self) -> Request:
        """Return what its media answer, without metadata, which are of the media.

        Raises:
            MediaProblem: A reference, or the mask, does not exist.
        """
        references = tuple(read_reference(medium) for medium in self.references)
        return Request(self.prompt, references, read_reference(self.mask) if self.mask else None)

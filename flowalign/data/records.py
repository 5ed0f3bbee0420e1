"""One row of a preference dataset or scoring job, whatever schema it came in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowalign.media.media import Media


@dataclass(frozen=True)
class Record:
    """A prompt with one medium to score, or with several that people compared.

    Every comparison is per named dimension and has one entry per medium. A dimension in which
    people gave no usable answer is absent.
    """

    id: str
    prompt: str
    media: Sequence[Media]
    references: Sequence[Media] = ()
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """1 is best; equal ranks are a tie."""
    votes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Share of the votes for each medium, summing to 1."""
    ratings: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Absolute human scores in the dataset's own units, higher is better."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why the row cannot be used, with its number; such a record may have no media."""

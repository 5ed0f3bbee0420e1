"""TODO module docstring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowalign.media.media import Media


@dataclass(frozen=True)
class Sample:
    """One medium that answers a prompt, and what is known of it."""

    prompt: str
    media: Media
    scores: Mapping[str, float] = field(default_factory=dict)
    """By dimension, higher is better."""
    desirable: bool | None = None
    """A person's thumb up or down, where there is one."""
    user: str = ""
    """Who judged it."""
    weight_map: str | None = None
    """A safetensors file with the importance of every place, see `functional.matching`."""


@dataclass(frozen=True)
class Segment:
    """Latent frames start to stop of a pair, and which medium is better there."""

    start: int
    stop: int
    label: int
    """1: the chosen one, -1: the rejected one, 0: neither."""


@dataclass(frozen=True)
class Pair:
    """Two media that answer one prompt, one of them preferred."""

    chosen: Sample
    rejected: Sample
    dimension: str = "overall"
    """In which it is preferred."""
    gap: float | None = None
    """By how much, in units of the score that decided."""
    weight: float = 1.0
    """Multiplies its loss."""
    stage: int = 0
    """Of a curriculum; earlier ones are easier."""
    segments: Sequence[Segment] = ()
    mask: str | None = None
    """A safetensors file that says where the two differ, see `functional.matching`."""
    mask_strength: float = 1.0
    """Multiplies the errors within the mask."""
    targets: tuple[str, str] | None = None
    """Prompts under which an expert says what winner and loser are matched to; null: the data."""
    user: str = ""
    """Who preferred it."""
    where: str = ""
    """File and row, for messages."""

    @property
    def prompt(self) -> str:
        """What both answer."""
        return self.chosen.prompt

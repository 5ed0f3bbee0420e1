"""Defines the interface of pair generators: for each clip a pair, or why there is none."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowalign.curation.clip_pairs.denoiser import ClipRegenerator, Clips
from flowalign.rewards.composite import Rewards


@dataclass(frozen=True)
class Side:
    """Holds one of the two clips of a pair."""

    latent: Float[Tensor, "C F H W"]
    media: Float[Tensor, "T 3 h w"]


@dataclass(frozen=True)
class ClipPair:
    """Holds a generated pair; the names of its sides appear in its files and columns."""

    sides: Mapping[str, Side]
    row: Mapping[str, Any]
    """Further columns of its row, as the reader of the method's data expects them."""
    mask: Float[Tensor, "F H W"] | None = None
    """Latent places where the sides differ: 1 inside, 0 outside."""


@dataclass(frozen=True)
class SkippedClip:
    """Says why a clip gives no pair."""

    problem: str
    """Kind of problem, a colon, and the details."""
    expected: bool = False
    """Whether the method leaves such clips out by design; otherwise it is an error."""


Results = list[ClipPair | SkippedClip]


class PairGenerator(ABC):
    """Generates pairs from real clips."""

    @abstractmethod
    def check(self, rewards: Rewards) -> None:
        """Raise ValueError if the method cannot work with these rewards."""

    @abstractmethod
    def make(self, regenerator: ClipRegenerator, clips: Clips) -> Results:
        """Return, for each clip, its pair or why there is none."""

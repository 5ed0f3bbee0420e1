"""Define the interface of pair generators: each video gives a pair or a reason."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowalign.extra.clip_pairs.denoiser import ClipRegenerator, Clips
from flowalign.rewards.composite import Rewards


@dataclass(frozen=True)
class Side:
    """One of the two videos of a pair."""

    latent: Float[Tensor, "C F H W"]
    media: Float[Tensor, "T 3 h w"]


@dataclass(frozen=True)
class ClipPair:
    """Generated pair; the names of its sides appear in its files and columns."""

    sides: Mapping[str, Side]
    row: Mapping[str, Any]
    """Additional columns of its row, in the format of the method's data reader."""
    mask: Float[Tensor, "F H W"] | None = None
    """Latent positions where the sides differ: 1 inside, 0 outside."""


@dataclass(frozen=True)
class SkippedClip:
    """Reason why a video gives no pair."""

    problem: str
    """Kind of problem, a colon, and the details."""
    expected: bool = False
    """Whether the method drops the video by design; otherwise it is an error."""


Results = list[ClipPair | SkippedClip]


class PairGenerator(ABC):
    """Generator of pairs from real videos."""

    @abstractmethod
    def check(self, rewards: Rewards) -> None:
        """Raise ValueError if the method cannot work with these rewards."""

    @abstractmethod
    def make(self, regenerator: ClipRegenerator, clips: Clips) -> Results:
        """Return a pair, or the reason why there is none, for each video."""

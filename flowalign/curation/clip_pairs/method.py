"""What a maker of pairs is: clips in, and for each a pair or the reason why there is none."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowalign.curation.clip_pairs.denoiser import Clips, Workshop
from flowalign.rewards.composite import Rewards


@dataclass(frozen=True)
class Side:
    """One of the two clips of a pair."""

    latent: Float[Tensor, "C F H W"]
    media: Float[Tensor, "T 3 h w"]


@dataclass(frozen=True)
class Made:
    """A pair; its files and its row are named by the sides."""

    sides: Mapping[str, Side]
    row: Mapping[str, Any]
    """Further columns, as the reader of the method's data takes them."""
    mask: Float[Tensor, "F H W"] | None = None
    """Where the sides differ."""


@dataclass(frozen=True)
class Dropped:
    """Why a clip gives no pair: what kind of reason, a colon, details."""

    problem: str
    ordinary: bool = False
    """The method expects some of these; otherwise it is a fault."""


Results = list[Made | Dropped]


class Method(ABC):
    """Makes pairs of real clips."""

    @abstractmethod
    def check(self, rewards: Rewards) -> None:
        """Raise ValueError where the rewards are not those that it needs."""

    @abstractmethod
    def make(self, workshop: Workshop, clips: Clips) -> Results:
        """One result for each clip."""

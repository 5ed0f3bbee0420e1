"""Which media that answer one prompt are compared: of rollouts, and by `flowalign pairs`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional import pairing

Indices = tuple[Int[Tensor, "m"], Int[Tensor, "m"]]


class Rule(ABC):
    """Pairs samples of one prompt by their scores."""

    @abstractmethod
    def most(self, num_samples: int) -> int:
        """The most pairs that it makes of so many samples."""

    @abstractmethod
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        """Winners and losers; samples whose scores are NaN take no part."""


@dataclass(frozen=True, kw_only=True)
class BestWorst(Rule):
    """The best against the worst, unless they are equal: online DPO as Flow-GRPO has it."""

    count: int = 1
    """And so many pairs in all: the second best against the second worst, and so on."""
    min_gap: float = 0.0
    """Of their totals."""

    def __post_init__(self) -> None:
        """Refuse what pairs nothing."""
        pairing.check_margin("rule.min_gap", self.min_gap)
        if self.count < 1:
            raise ValueError(f"rule.count is {self.count}; it must be at least 1")

    @override
    def most(self, num_samples: int) -> int:
        """As many, if there are samples for them."""
        return min(self.count, num_samples // 2)

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        """The extremes of the total."""
        return pairing.extremes(total, self.count, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class Gap(Rule):
    """All pairs whose totals are at least `min_gap` apart."""

    min_gap: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a gap that no pair can have."""
        pairing.check_margin("rule.min_gap", self.min_gap)

    @override
    def most(self, num_samples: int) -> int:
        """All of them."""
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        """By the total."""
        return pairing.over_gap(total, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class Dominance(Rule):
    """MPO: the winner is worse in no dimension, and its total better by `min_gap`.

    Source: VisionReward, arXiv:2412.21059.
    """

    min_gap: float = 0.0
    tolerance: float = 0.0
    """By how much it may be worse in one."""

    def __post_init__(self) -> None:
        """Refuse numbers that no pair can have."""
        pairing.check_margin("rule.min_gap", self.min_gap)
        pairing.check_margin("rule.tolerance", self.tolerance)

    @override
    def most(self, num_samples: int) -> int:
        """All of them."""
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        """By every dimension."""
        return pairing.dominating(scores, total, self.tolerance, self.min_gap)

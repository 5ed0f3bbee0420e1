"""Chooses winners and losers among media of one prompt.

The rules pair the rollouts of online DPO and the scored media of `flowalign pairs`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional import pairing
from flowalign.types.ranges import NonNegativeFloat, PositiveInt

Indices = tuple[Int[Tensor, "m"], Int[Tensor, "m"]]


class Rule(ABC):
    """Pairs samples of one prompt by their scores."""

    @abstractmethod
    def most(self, num_samples: int) -> int:
        """Return the largest number of pairs that `num_samples` samples of a prompt can give."""

    @abstractmethod
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        """Return the indices of winners and losers; samples whose scores are NaN are left out."""


@dataclass(frozen=True, kw_only=True)
class BestWorst(Rule):
    """Pairs the best with the worst, unless they are equal: online DPO as Flow-GRPO has it."""

    count: PositiveInt = 1
    """Pairs per prompt: best against worst, second best against second worst, and so on."""
    min_gap: NonNegativeFloat = 0.0
    """Smallest difference between the weighted sums of rewards of a pair."""

    def __post_init__(self) -> None:
        """Refuse numbers that give no pair."""
        pairing.check_margin("rule.min_gap", self.min_gap)
        if self.count < 1:
            raise ValueError(f"rule.count is {self.count}; it must be at least 1")

    @override
    def most(self, num_samples: int) -> int:
        return min(self.count, num_samples // 2)

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_extremes(total, self.count, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class Gap(Rule):
    """Pairs all samples whose weighted sums of rewards are at least `min_gap` apart."""

    min_gap: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        """Refuse a gap that no pair can have."""
        pairing.check_margin("rule.min_gap", self.min_gap)

    @override
    def most(self, num_samples: int) -> int:
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_over_gap(total, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class Dominance(Rule):
    """Pairs by dominance (MPO): a winner is worse in no dimension, and better in its weighted sum.

    Source: VisionReward, arXiv:2412.21059.
    """

    min_gap: NonNegativeFloat = 0.0
    """Smallest difference between the weighted sums of rewards of a pair."""
    tolerance: NonNegativeFloat = 0.0
    """How much worse a winner may be in one dimension, in units of its score."""

    def __post_init__(self) -> None:
        """Refuse numbers that no pair can have."""
        pairing.check_margin("rule.min_gap", self.min_gap)
        pairing.check_margin("rule.tolerance", self.tolerance)

    @override
    def most(self, num_samples: int) -> int:
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_dominating(scores, total, self.tolerance, self.min_gap)

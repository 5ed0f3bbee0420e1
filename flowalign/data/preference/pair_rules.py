"""Choose winners and losers among the samples of one prompt.

Online DPO applies the rules to its rollouts, `flowalign pairs` to scored files.
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
    """Rule that pairs the samples of one prompt by their scores."""

    @abstractmethod
    def most(self, num_samples: int) -> int:
        """Return the largest possible number of pairs among `num_samples` samples of a prompt."""

    @abstractmethod
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        """Return the indices of winners and losers; samples with NaN scores are skipped.

        `total` is the weighted sum of the rewards of each sample.
        """


@dataclass(frozen=True, kw_only=True)
class BestWorst(Rule):
    """Best sample against the worst, unless their scores are equal; online DPO of Flow-GRPO."""

    count: PositiveInt = 1
    """Number of pairs per prompt: best against worst, second best against second worst, ..."""
    min_gap: NonNegativeFloat = 0.0
    """Smallest difference between the weighted reward sums of a pair."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that allow no pair."""
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
    """All pairs of samples with a difference of at least `min_gap` in weighted reward sum."""

    min_gap: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a gap that no pair can have."""
        pairing.check_margin("rule.min_gap", self.min_gap)

    @override
    def most(self, num_samples: int) -> int:
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_over_gap(total, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class Dominance(Rule):
    """All pairs in which the winner is worse in no dimension and better in the weighted sum (MPO).

    Source: VisionReward, arXiv:2412.21059.
    """

    min_gap: NonNegativeFloat = 0.0
    """Smallest difference between the weighted reward sums of a pair."""
    tolerance: NonNegativeFloat = 0.0
    """Largest amount by which a winner may be worse in a dimension, in units of its score."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that allow no pair."""
        pairing.check_margin("rule.min_gap", self.min_gap)
        pairing.check_margin("rule.tolerance", self.tolerance)

    @override
    def most(self, num_samples: int) -> int:
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_dominating(scores, total, self.tolerance, self.min_gap)

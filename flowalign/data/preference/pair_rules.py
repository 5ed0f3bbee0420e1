"""Choose winners and losers among the samples of one prompt.

Online DPO applies the rules to its rollouts, `flowalign pairs` to scored files.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional import pairing
from flowalign.types.ranges import NonNegativeFloat, PositiveInt, require_ranges

Indices = tuple[Int[Tensor, "m"], Int[Tensor, "m"]]


class Rule(ABC):
    """Rule that pairs the samples of one prompt by their scores."""

    def __post_init__(self) -> None:
        """Reject settings outside the ranges of their types, if the rule is a dataclass."""
        require_ranges(self, "rule")

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

    @override
    def most(self, num_samples: int) -> int:
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_dominating(scores, total, self.tolerance, self.min_gap)

"""Weight pairs by the gap between their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flowalign.data.preference.preference_data import Pair, Sample
from flowalign.functional.combine import gap_weights, unit_range
from flowalign.types.ranges import FiniteFloat, NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class GapWeights:
    """Pair weights alpha^R(chosen) - alpha^R(rejected), R a score scaled to [0, 1] (GAPO).

    R is scaled over the whole dataset. A pair that contradicts its scores gets weight 0.

    Source: AnimeReward, arXiv:2504.10044, with alpha 2 (from a secondary source).
    """

    scores: Mapping[str, FiniteFloat]
    """Weight of each dimension in the score R, a weighted sum."""
    alpha: NonNegativeFloat = 2.0
    """Base of the power, above 1. A larger base gives more weight to gaps between high scores."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that give every pair weight 0."""
        if not self.scores or not self.alpha > 1:
            raise ValueError(
                f"data.weighting: scores {dict(self.scores)}, alpha {self.alpha}; "
                "need at least one dimension, and alpha above 1"
            )

    def weigh(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs with their weights multiplied by the weight of their gap.

        Raises:
            ValueError: A score is missing.
        """
        sides = [[p.chosen for p in pairs], [p.rejected for p in pairs]]
        scores = [self._score(s, p) for side in sides for s, p in zip(side, pairs, strict=True)]
        value = torch.tensor(scores)[:, None]
        one_group = torch.zeros(len(scores), dtype=torch.long)
        scaled = unit_range(value, value.isfinite(), one_group)[:, 0]
        chosen, rejected = scaled.chunk(2)
        weights = gap_weights(chosen, rejected, self.alpha).clamp(min=0).tolist()
        return [replace(p, weight=p.weight * w) for p, w in zip(pairs, weights, strict=True)]

    def _score(self, sample: Sample, pair: Pair) -> float:
        missing = sorted(self.scores.keys() - sample.scores.keys())
        if missing:
            raise ValueError(
                f"data.weighting needs scores {missing}; {pair.where} has {sorted(sample.scores)}"
            )
        return sum(weight * sample.scores[dim] for dim, weight in self.scores.items())

"""Weights of pairs from the gap between their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flowalign.data.preference.pairs import Pair, Sample
from flowalign.functional.combine import gap_weights, unit_range


@dataclass(frozen=True, kw_only=True)
class GapWeights:
    """GAPO: a pair weighs alpha^R(chosen) - alpha^R(rejected), R a score scaled to [0, 1].

    A pair that its scores contradict weighs nothing.

    Source: AnimeReward, arXiv:2504.10044 (second hand), alpha 2; scaled over the whole dataset.
    """

    scores: Mapping[str, float]
    """Dimensions whose weighted sum is the score."""
    alpha: float = 2.0

    def __post_init__(self) -> None:
        """Refuse what weighs nothing."""
        if not self.scores or not self.alpha > 1:
            raise ValueError(
                f"data.weighting: scores {dict(self.scores)}, alpha {self.alpha}; "
                "need at least one dimension, and alpha above 1"
            )

    def weighted(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs with their weights. ValueError where a score is missing."""
        sides = [[p.chosen for p in pairs], [p.rejected for p in pairs]]
        scores = [self._score(s, p) for side in sides for s, p in zip(side, pairs, strict=True)]
        value = torch.tensor(scores)[:, None]
        everything = torch.zeros(len(scores), dtype=torch.long)
        unit = unit_range(value, value.isfinite(), everything)[:, 0]
        chosen, rejected = unit.chunk(2)
        weights = gap_weights(chosen, rejected, self.alpha).clamp(min=0).tolist()
        return [replace(p, weight=p.weight * w) for p, w in zip(pairs, weights, strict=True)]

    def _score(self, sample: Sample, pair: Pair) -> float:
        missing = sorted(self.scores.keys() - sample.scores.keys())
        if missing:
            raise ValueError(
                f"data.weighting needs scores {missing}; {pair.where} has {sorted(sample.scores)}"
            )
        return sum(weight * sample.scores[dim] for dim, weight in self.scores.items())

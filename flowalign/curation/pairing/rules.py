"""Choose the pairs among the samples of one prompt, by the rules of the command line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.data.preference import pair_rules as rules
from flowalign.functional import pairing

PER_DIMENSION = "per_dimension"
RULES = ("best_worst", "gap", "dominance", PER_DIMENSION)
STAGES = {"score": pairing.stages_by_score, "rank": pairing.stages_by_rank}
TOTAL = "total"
"""Name of the weighted sum of several dimensions, in rows and on the page."""


class PairChoice(NamedTuple):
    """Pair by its rows of the table, with the deciding dimension and the gap."""

    winner: int
    """Row of the winner."""
    loser: int
    """Row of the loser."""
    dimension: str
    gap: float
    """Lead of the winner, above 0, in units of the dimension."""
    stage: int = 0
    """Stage of a curriculum, from 0; earlier stages have wider gaps."""


@dataclass(frozen=True)
class PairingRule:
    """Settings of one of `RULES`."""

    name: str = "best_worst"
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each dimension, in the order of the scores; their weighted sum is the total."""
    min_gap: float = 0.0
    """Smallest gap of a pair, in units of the total or of the deciding dimension."""
    tolerance: float = 0.0
    """Largest deficit of a winner in any dimension, for dominance."""
    max_per_prompt: int | None = None
    """Largest number of pairs per prompt, those with the widest gaps. If each dimension has its own
    pairs, the limit is per dimension. None: all."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that no pair can meet."""
        if self.name not in RULES:
            raise ValueError(f"--rule is {self.name!r}; it must be one of {', '.join(RULES)}")
        pairing.check_margin("--min_gap", self.min_gap)
        pairing.check_margin("--tolerance", self.tolerance)
        if self.needs_all and len(self.weights) > 1 and TOTAL in self.weights:
            raise ValueError(f"rename dimension {TOTAL!r}: the name stands for the weighted sum")
        for dim, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"--weights {dim}={weight:g}; weights must be above 0")
        if self.max_per_prompt is not None and self.max_per_prompt < 1:
            raise ValueError(f"--max_per_prompt is {self.max_per_prompt}; it must be at least 1")

    @property
    def needs_all(self) -> bool:
        """Whether a sample needs a score in every dimension to be compared."""
        return self.name != PER_DIMENSION

    @property
    def comparison(self) -> rules.Rule:
        """Rule of `pair_rules` that compares the samples of a prompt."""
        if self.name == "dominance":
            return rules.Dominance(min_gap=self.min_gap, tolerance=self.tolerance)
        kind = rules.BestWorst if self.name == "best_worst" else rules.Gap
        return kind(min_gap=self.min_gap)

    @property
    def decides(self) -> str:
        """Name of the total; with one dimension, the name of the dimension."""
        return next(iter(self.weights)) if len(self.weights) == 1 else TOTAL

    def total(self, scores: Float[Tensor, "n R"]) -> Float[Tensor, "n"]:
        """Return the weighted sum of the dimensions."""
        return scores @ torch.tensor(list(self.weights.values()), dtype=scores.dtype)

    def choose(
        self,
        rows: Int[Tensor, "K"],
        scores: Float[Tensor, "K R"],
        total: Float[Tensor, "K"],
    ) -> list[PairChoice]:
        """Return the pairs of one prompt, from its rows of the table."""
        compared = (
            [(self.decides, total)]
            if self.needs_all
            else list(zip(self.weights, scores.unbind(1), strict=True))
        )
        found = [(dim, self.comparison.pairs(scores, by), by) for dim, by in compared]
        return [
            choice for dim, places, by in found for choice in self._widest(rows, dim, places, by)
        ]

    def _widest(
        self,
        rows: Int[Tensor, "K"],
        dimension: str,
        places: pairing.Positions,
        by: Float[Tensor, "K"],
    ) -> list[PairChoice]:
        winner, loser = places
        gap = by[winner] - by[loser]
        if self.max_per_prompt is not None:
            kept = pairing.select_widest(gap, self.max_per_prompt)
            winner, loser, gap = winner[kept], loser[kept], gap[kept]
        found = zip(rows[winner].tolist(), rows[loser].tolist(), gap.tolist(), strict=True)
        return [PairChoice(i, j, dimension, size) for i, j, size in found]


def assign_stages(choices: Sequence[PairChoice], count: int, by: str) -> list[PairChoice]:
    """Return the pairs with stages of a curriculum, divided separately for each dimension."""
    found = list(choices)
    for dim in dict.fromkeys(choice.dimension for choice in choices):
        places = [i for i, choice in enumerate(choices) if choice.dimension == dim]
        gaps = torch.tensor([choices[i].gap for i in places], dtype=torch.float64)
        for i, stage in zip(places, STAGES[by](gaps, count).tolist(), strict=True):
            found[i] = found[i]._replace(stage=stage)
    return found

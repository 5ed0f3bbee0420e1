"""Which of the media that answer one prompt become pairs, as the command line says."""

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
"""Name of the weighted sum of several dimensions."""


class Choice(NamedTuple):
    """A pair: rows of the table, what decided, and by how much."""

    winner: int
    loser: int
    dimension: str
    gap: float
    stage: int = 0


@dataclass(frozen=True)
class Rule:
    """One of `RULES`, and its numbers."""

    name: str = "best_worst"
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the dimensions, in the order of the scores; their weighted sum is the total."""
    min_gap: float = 0.0
    tolerance: float = 0.0
    max_per_prompt: int | None = None
    """The widest so many; of every dimension, where each has its own pairs."""

    def __post_init__(self) -> None:
        """Refuse numbers that no pair can have."""
        if self.name not in RULES:
            raise ValueError(f"--rule {self.name!r} is unknown; there are {', '.join(RULES)}")
        pairing.check_margin("--min_gap", self.min_gap)
        pairing.check_margin("--tolerance", self.tolerance)
        if self.needs_all and len(self.weights) > 1 and TOTAL in self.weights:
            raise ValueError(f"dimension {TOTAL!r} would be mistaken for the weighted sum")
        for dim, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"--weights {dim}={weight:g}; weights must be above 0")
        if self.max_per_prompt is not None and self.max_per_prompt < 1:
            raise ValueError(f"--max_per_prompt is {self.max_per_prompt}; it must be at least 1")

    @property
    def needs_all(self) -> bool:
        """Whether a medium without a score in one dimension is out altogether."""
        return self.name != PER_DIMENSION

    @property
    def comparison(self) -> rules.Rule:
        """How the media of a prompt are compared: by their totals, or in one dimension."""
        if self.name == "dominance":
            return rules.Dominance(min_gap=self.min_gap, tolerance=self.tolerance)
        kind = rules.BestWorst if self.name == "best_worst" else rules.Gap
        return kind(min_gap=self.min_gap)

    @property
    def decides(self) -> str:
        """What the total is called: the only dimension by its own name."""
        return next(iter(self.weights)) if len(self.weights) == 1 else TOTAL

    def total(self, scores: Float[Tensor, "n R"]) -> Float[Tensor, "n"]:
        """The weighted sum of the dimensions."""
        return scores @ torch.tensor(list(self.weights.values()), dtype=scores.dtype)

    def choose(
        self,
        rows: Int[Tensor, "K"],
        scores: Float[Tensor, "K R"],
        total: Float[Tensor, "K"],
    ) -> list[Choice]:
        """The pairs of one prompt, whose media are these rows of the table."""
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
    ) -> list[Choice]:
        winner, loser = places
        gap = by[winner] - by[loser]
        if self.max_per_prompt is not None:
            kept = pairing.widest(gap, self.max_per_prompt)
            winner, loser, gap = winner[kept], loser[kept], gap[kept]
        found = zip(rows[winner].tolist(), rows[loser].tolist(), gap.tolist(), strict=True)
        return [Choice(i, j, dimension, size) for i, j, size in found]


def staged(choices: Sequence[Choice], count: int, by: str) -> list[Choice]:
    """The same pairs with the stage in which each joins a curriculum, dimension by dimension."""
    found = list(choices)
    for dim in dict.fromkeys(choice.dimension for choice in choices):
        places = [i for i, choice in enumerate(choices) if choice.dimension == dim]
        gaps = torch.tensor([choices[i].gap for i in places], dtype=torch.float64)
        for i, stage in zip(places, STAGES[by](gaps, count).tolist(), strict=True):
            found[i] = found[i]._replace(stage=stage)
    return found

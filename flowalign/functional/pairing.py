"""Choose which media of a prompt form preference pairs, and in which curriculum stage.

Rules take the scores of one prompt's K media (higher is better) and return positions of winners and
of losers; a pair's gap is total[winner] - total[loser]. Media with a NaN never take part, and equal
scores make no pair. `pair_over_gap` and `pair_dominating` order pairs by the position of the
earlier medium, then by that of the later one.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Positions = tuple[Int[Tensor, "m"], Int[Tensor, "m"]]
"""Positions of the winners and, in the same order, of their losers."""


def check_margin(name: str, value: float) -> None:
    """Reject a minimum gap or a tolerance that is negative or not finite, naming it."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value:g}; it must be at least 0")


def pair_extremes(total: Float[Tensor, "K"], count: int = 1, min_gap: float = 0.0) -> Positions:
    """Pair the best with the worst, the second best with the second worst, and so on.

    At most `count` pairs are returned, none of a medium with itself, of equal totals, or of totals
    less than min_gap apart. Among equal totals the first medium is taken, as winner and as loser.
    """
    known = total.isfinite().nonzero()[:, 0]
    count = min(count, len(known) // 2)
    best = known[total[known].argsort(descending=True, stable=True)][:count]
    worst = known[total[known].argsort(stable=True)][:count]
    lead = total[best] - total[worst]
    apart = (lead > 0) & (lead >= min_gap)
    return best[apart], worst[apart]


def pair_over_gap(total: Float[Tensor, "K"], min_gap: float = 0.0) -> Positions:
    """Return all pairs whose totals are at least min_gap apart."""
    return _pairs(_leads(total, min_gap))


def pair_dominating(
    scores: Float[Tensor, "K R"],
    total: Float[Tensor, "K"],
    tolerance: float = 0.0,
    min_gap: float = 0.0,
) -> Positions:
    """Return pairs in which no dimension of the winner is more than tolerance below the loser's.

    The total has to be higher, too, by at least min_gap. Media with a NaN in any dimension are left
    out.

    Source: VisionReward's multi-objective preference optimization, arXiv:2412.21059v4: all R_k(i)
    >= R_k(j), and a gap of the total; a tolerance is ours, for many dimensions.
    """
    no_worse = (scores[:, None] >= scores[None] - tolerance).all(-1)
    return _pairs(no_worse & _leads(total, min_gap))


def select_widest(gap: Float[Tensor, "m"], count: int) -> Int[Tensor, "k"]:
    """Return the positions of the `count` largest gaps, in rising order; ties keep the first."""
    return gap.argsort(descending=True, stable=True)[:count].sort().values


# Curriculum ---------------------------------------------------------------------------------------


def stages_by_score(gap: Float[Tensor, "m"], count: int) -> Int[Tensor, "m"]:
    """Return the stage, 0 ... count - 1, in which each pair is new; the widest gaps come first.

    Bounds divide the range between the largest and the smallest gap into `count` equal parts; stage
    k is trained on the pairs of stages 0 to k.

    Source: the code of Curriculum-DPO, arXiv:2405.13637, whose `groups` is count + 1.
    """
    if len(gap) == 0:
        return torch.zeros(0, dtype=torch.long)
    high, low = gap.max(), gap.min()
    bounds = high - torch.arange(1, count, dtype=gap.dtype) * ((high - low) / count)
    return (gap[:, None] < bounds).sum(1)


def stages_by_rank(gap: Float[Tensor, "m"], count: int) -> Int[Tensor, "m"]:
    """Return stages as `stages_by_score` does, with equal numbers of new pairs to within one.

    Source: Curriculum-DPO, arXiv:2405.13637, which divides by rank in the paper.
    """
    rank = torch.empty(len(gap), dtype=torch.long)
    rank[gap.argsort(descending=True, stable=True)] = torch.arange(len(gap))
    return rank * count // max(len(gap), 1)


def _leads(total: Float[Tensor, "K"], min_gap: float) -> Bool[Tensor, "K K"]:
    """Return whether the row's medium leads the column's; comparisons with NaN are False."""
    lead = total[:, None] - total[None]
    return (lead > 0) & (lead >= min_gap)


def _pairs(wins: Bool[Tensor, "K K"]) -> Positions:
    """List the True entries as pairs, ordered by the earlier and then the later position."""
    winner, loser = wins.nonzero().unbind(1)
    earlier, later = torch.minimum(winner, loser), torch.maximum(winner, loser)
    order = (earlier * len(wins) + later).argsort()
    return winner[order], loser[order]

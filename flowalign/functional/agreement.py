"""Measure the agreement of scores with annotators: accuracy, correlation and calibration.

For a pair (A, B), `lead` is the score of A minus the score of B. `human` is 1 if annotators
preferred A, -1 if they preferred B, and 0 for a tie. `share` is the share of the votes for A; a tie
counts as 0.5. Undefined results, such as the accuracy over no pairs, are NaN.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional import resampling

# Accuracy -----------------------------------------------------------------------------------------


class TieThreshold(NamedTuple):
    """Tie threshold and its accuracy; pairs with |lead| <= threshold count as ties.

    At threshold 0 only equal scores are ties.
    """

    accuracy: float
    threshold: float


def accuracy_without_ties(lead: Float[Tensor, "n"], human: Int[Tensor, "n"]) -> float:
    """Return the share of decided pairs with the annotators' order; equal scores are wrong."""
    decided = human != 0
    return _mean((lead.sign() == human)[decided])


def accuracy_with_ties(
    lead: Float[Tensor, "n"], human: Int[Tensor, "n"], threshold: float
) -> float:
    """Return the share of correct pairs among win, loss and tie; |lead| <= threshold is a tie."""
    return _mean(torch.where(lead.abs() <= threshold, 0.0, lead.sign()) == human)


def best_tie_threshold(lead: Float[Tensor, "n"], human: Int[Tensor, "n"]) -> TieThreshold:
    """Return the smallest threshold with the highest accuracy, by an exact search over all leads.

    The accuracy is optimistic, because the threshold is fitted on the same pairs. For an unbiased
    estimate see `resampling.held_out_accuracy`. The search is O(n log n).

    Source: tie calibration of "Ties Matter", arXiv:2305.14324.
    """
    if len(lead) == 0:
        return TieThreshold(math.nan, math.nan)
    right, threshold = resampling.best_threshold(lead, human, _once(lead))
    return TieThreshold(float(right) / len(lead), float(threshold))


def videoalign_accuracy_with_ties(lead: Float[Tensor, "n"], human: Int[Tensor, "n"]) -> float:
    """Return VideoAlign's `calc_accuracy_with_ties`, for comparison with its tables.

    It never tries a threshold without ties, so it can be too low. It splits leads of equal size
    into ties and decisions by row order, so it can also be too high.
    """
    _, right = resampling.right_if_first_are_ties(lead, human, _once(lead))
    return float(right[0, 1:].max()) / len(lead) if len(lead) else math.nan


def score_whole_sets(
    lead: Float[Tensor, "n"],
    human: Int[Tensor, "n"],
    group: Int[Tensor, "n"],
    threshold: float,
    cluster: Int[Tensor, "n"],
) -> tuple[Float[Tensor, "g"], Int[Tensor, "g"]]:
    """Return 1 for each group with all pairs right, else 0, and the cluster of each group.

    A decided pair is right if the scores have the annotators' order, for any lead. A tie is right
    if |lead| <= threshold.

    Source: TIGER-AI-Lab/EditReward @ 84602889f4, evaluate/eval_bench.py.
    """
    right = torch.where(human == 0, lead.abs() <= threshold, lead.sign() == human)
    ids, index = group.unique(return_inverse=True)
    wrong = torch.zeros(len(ids), dtype=torch.float64).index_add(0, index, (~right).double())
    return (wrong == 0).double(), cluster.new_zeros(len(ids)).scatter(0, index, cluster)


# Correlation --------------------------------------------------------------------------------------


def spearman(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> float:
    """Return the correlation of ranks, which equal values share; NaN if x or y is constant."""
    return float(resampling.spearman(x, y, _once(x)))


def kendall(
    x: Float[Tensor, "n"], y: Float[Tensor, "n"], group: Int[Tensor, "n"]
) -> Float[Tensor, "g"]:
    """Return Kendall's tau-b of each group, in the order of the ids; NaN if x or y is constant."""
    ids, index = group.unique(return_inverse=True)
    i, j = list_pairs(group)
    dx, dy = (x[i] - x[j]).sign().double(), (y[i] - y[j]).sign().double()
    sums = torch.zeros(3, len(ids), dtype=torch.float64)
    sums.index_add_(1, index[i], torch.stack([dx * dy, dx**2, dy**2]))
    return sums[0] / (sums[1] * sums[2]).sqrt()


def list_pairs(group: Int[Tensor, "n"]) -> tuple[Int[Tensor, "p"], Int[Tensor, "p"]]:
    """Return every pair of rows of a group once, as two index lists, the earlier row first."""
    order = group.argsort(stable=True)
    ids = group[order]
    largest = int(group.unique(return_counts=True)[1].max()) if len(group) else 0
    first, second = [order[:0]], [order[:0]]
    for distance in range(1, largest):
        same = ids[distance:] == ids[:-distance]
        first.append(order[:-distance][same])
        second.append(order[distance:][same])
    return torch.cat(first), torch.cat(second)


def krippendorff_alpha(
    values: Float[Tensor, "u r"], distance: Literal["nominal", "ordinal", "interval"]
) -> float:
    """Return Krippendorff's alpha of r annotators on u units; NaN values are missing.

    1 is perfect agreement and 0 agreement by chance. The result is NaN if no unit has two values or
    all values are equal.

    Source: K. Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011).
    """
    levels = values[values.isfinite()].double().unique()
    count = (values[..., None] == levels).sum(1).double()
    count = count[count.sum(1) > 1]
    weight = 1 / (count.sum(1) - 1)
    together = torch.einsum("uc,uk,u->ck", count, count, weight) - (weight @ count).diag()
    num = together.sum(1)
    difference = 1.0 - torch.eye(len(levels), dtype=torch.float64)
    if distance == "ordinal":
        place = num.cumsum(0) - num / 2
        difference = (place[:, None] - place).square()
    elif distance == "interval":
        difference = (levels[:, None] - levels).square()
    chance = float(num @ difference @ num)
    return (
        1 - float((num.sum() - 1) * (together * difference).sum()) / chance if chance else math.nan
    )


# Calibration --------------------------------------------------------------------------------------


class Reliability(NamedTuple):
    """Mean confidence, accuracy and number of pairs of each confidence bin."""

    confidence: Float[Tensor, "bins"]
    accuracy: Float[Tensor, "bins"]
    num: Int[Tensor, "bins"]

    @property
    def error(self) -> float:
        """Return the expected calibration error, the mean of |accuracy - confidence| over pairs."""
        gap = torch.where(self.num > 0, (self.accuracy - self.confidence).abs(), 0.0)
        total = int(self.num.sum())
        return float(gap @ self.num.double()) / total if total else math.nan


def reliability(
    lead: Float[Tensor, "n"], share: Float[Tensor, "n"], num_bins: int = 10
) -> Reliability:
    """Return the win rate of the higher-scored side, binned by its Bradley-Terry probability.

    The probability is folded to [0.5, 1], so the result does not depend on which side is A.
    Otherwise datasets that list the winner first would distort the calibration. Bins have equal
    width.
    """
    confidence = lead.double().abs().sigmoid()
    won = 0.5 + lead.double().sign() * (share.double() - 0.5)
    place = ((confidence - 0.5) * 2 * num_bins).long().clamp(0, num_bins - 1)
    count = torch.bincount(place, minlength=num_bins)
    sums = torch.zeros(2, num_bins, dtype=torch.float64)
    sums.index_add_(1, place, torch.stack([confidence, won]))
    return Reliability(sums[0] / count, sums[1] / count, count)


def temperature(lead: Float[Tensor, "n"], share: Float[Tensor, "n"]) -> float:
    """Return the maximum-likelihood T of P(A) = sigmoid(lead / T).

    T is infinite if the leads do not predict the votes, and 0 if they predict them without error.
    """
    lead, share = lead.double(), share.double()

    def slope(beta: float) -> float:
        """Return d cross-entropy / d beta, beta = 1 / T, increasing; its root is the optimum."""
        return float(((beta * lead).sigmoid() - share) @ lead)

    if slope(0.0) >= 0:
        return math.inf
    mistaken = torch.where(lead > 0, 1 - share, share)[lead != 0]
    if float(mistaken.sum()) == 0:
        return 0.0
    low, high = 0.0, 1 / float(lead.abs().mean())
    while slope(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


def calibrate_leads(
    lead: Float[Tensor, "n"], share: Float[Tensor, "n"], fold: Int[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return leads divided by the temperature of the other folds, so no row calibrates itself.

    Equal scores stay equal, also at temperature 0. With a single fold the result is NaN.
    """
    out, parts = torch.full_like(lead, math.nan, dtype=torch.float64), fold.unique()
    for part in parts if len(parts) > 1 else ():
        in_fold = fold == part
        cold = lead[in_fold].double() / temperature(lead[~in_fold], share[~in_fold])
        out[in_fold] = torch.where(lead[in_fold] == 0, 0.0, cold)
    return out


def folds(cluster: Int[Tensor, "n"], num: int, generator: torch.Generator) -> Int[Tensor, "n"]:
    """Return a random fold 0 ... num - 1 for each row; rows of a cluster stay together."""
    ids, index = cluster.unique(return_inverse=True)
    return (torch.randperm(len(ids), generator=generator) % num)[index]


def _once(x: Tensor) -> Float[Tensor, "1 n"]:
    """Return the resample in which each row occurs once."""
    return torch.ones(1, len(x), dtype=torch.float64)


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else math.nan

"""Compute bootstrap intervals of the statistics in `agreement`, for many resamples at once.

A resample is a weight per row, the number of times that the row was drawn. Each function takes b
resamples and returns b values, equal to `agreement` on repeated rows. A value is NaN if the
resample contains no relevant row.

Aggregates of a benchmark, the numbers that its authors report, take resamples of items in the same
way; weights of 1 give the reported number.
"""

import math
from collections.abc import Callable, Hashable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.degradation import student_quantile

_ENTRIES = 2_000_000
"""Largest size of the matrix (resamples x rows) that is computed at once."""


def number_values(values: Sequence[Hashable]) -> Int[Tensor, "n"]:
    """Return values as numbers 0, 1, ... in the order in which they first appear."""
    number = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([number[value] for value in values], dtype=torch.long)


def bootstrap(
    statistic: Callable[[Float[Tensor, "b n"]], Float[Tensor, "b"]],
    cluster: Int[Tensor, "n"],
    repeats: int,
    generator: torch.Generator,
    level: float = 0.95,
    stratum: Int[Tensor, "n"] | None = None,
) -> tuple[float, float]:
    """Return the percentile interval of a statistic over resamples of whole clusters.

    Pairs of one prompt share images, so whole prompts are drawn. With a `stratum` per row, clusters
    are drawn within each stratum: one cluster fewer than it has, which makes the variance of a
    mean over few clusters unbiased (Rao and Wu, JASA 1988). The interval is NaN if there are fewer
    than two clusters, or if the statistic is NaN in every resample.

    Raises:
        ValueError: A cluster has rows in several strata.
    """
    ids, index = cluster.unique(return_inverse=True)
    if len(ids) < 2:
        return math.nan, math.nan
    parts = _find_members(len(ids), index, stratum)
    values, step = [], max(1, _ENTRIES // len(cluster))
    for start in range(0, repeats, step):
        b = min(step, repeats - start)
        count = torch.zeros(b, len(ids), dtype=torch.float64)
        for members in parts:
            size = len(members) if stratum is None else max(len(members) - 1, 1)
            drawn = members[torch.randint(len(members), (b, size), generator=generator)]
            count.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=count.dtype))
        values.append(statistic(count[:, index]))
    return percentile_interval(torch.cat(values), level)


def percentile_interval(values: Float[Tensor, "b"], level: float = 0.95) -> tuple[float, float]:
    """Return the central interval that contains a share `level` of the values, without NaN."""
    known = values[~values.isnan()]
    if len(known) == 0:
        return math.nan, math.nan
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = known.double().quantile(ends).tolist()
    return low, high


def _find_members(
    num_clusters: int, index: Int[Tensor, "n"], stratum: Int[Tensor, "n"] | None
) -> list[Int[Tensor, "m"]]:
    """Return the clusters of each stratum; all clusters without strata."""
    if stratum is None:
        return [torch.arange(num_clusters)]
    own = torch.full((num_clusters,), -1).scatter(0, index, stratum)
    if not torch.equal(own[index], stratum):
        raise ValueError("a cluster has rows in several strata; clusters must lie in one")
    return [(own == one).nonzero().flatten() for one in own.unique()]


def mean(x: Float[Tensor, "n"], weight: Float[Tensor, "b n"]) -> Float[Tensor, "b"]:
    """Return the mean over the rows drawn by each resample."""
    return weight @ x.double() / weight.sum(1)


def accuracy_without_ties(
    lead: Float[Tensor, "n"], human: Int[Tensor, "n"], weight: Float[Tensor, "b n"]
) -> Float[Tensor, "b"]:
    """Return the accuracy on pairs with a human preference."""
    decided = human != 0
    return mean((lead.sign() == human)[decided].double(), weight[:, decided])


def best_accuracy(
    lead: Float[Tensor, "n"], human: Int[Tensor, "n"], weight: Float[Tensor, "b n"]
) -> Float[Tensor, "b"]:
    """Return the accuracy with ties, at the best threshold of each resample."""
    return best_threshold(lead, human, weight)[0] / weight.sum(1)


def held_out_accuracy(
    lead: Float[Tensor, "n"],
    human: Int[Tensor, "n"],
    fold: Int[Tensor, "n"],
    weight: Float[Tensor, "b n"],
) -> Float[Tensor, "b"]:
    """Return the accuracy with ties; each fold uses the best threshold of the other folds."""
    parts, right = fold.unique(), torch.zeros(len(weight), dtype=torch.float64)
    if len(parts) < 2:
        return right.fill_(math.nan)
    for part in parts:
        in_fold = fold == part
        threshold = best_threshold(lead[~in_fold], human[~in_fold], weight[:, ~in_fold])[1]
        tie = lead[in_fold].abs().double() <= threshold[:, None]
        correct = torch.where(tie, human[in_fold] == 0, lead[in_fold].sign() == human[in_fold])
        right += (correct * weight[:, in_fold]).sum(1)
    return right / weight.sum(1)


def calibration_error(
    lead: Float[Tensor, "n"], share: Float[Tensor, "n"], num_bins: int, weight: Float[Tensor, "b n"]
) -> Float[Tensor, "b"]:
    """Return the expected calibration error, `agreement.reliability(...).error`."""
    confidence = lead.double().abs().sigmoid()
    won = 0.5 + lead.double().sign() * (share.double() - 0.5)
    place = ((confidence - 0.5) * 2 * num_bins).long().clamp(0, num_bins - 1)
    gaps = torch.zeros(len(lead), num_bins, dtype=torch.float64)
    gaps.scatter_(1, place[:, None], (won - confidence)[:, None])
    return (weight @ gaps).abs().sum(1) / weight.sum(1)


def spearman(
    x: Float[Tensor, "n"], y: Float[Tensor, "n"], weight: Float[Tensor, "b n"]
) -> Float[Tensor, "b"]:
    """Return the correlation of ranks, which are computed inside each resample."""
    total = weight.sum(1, keepdim=True)
    a, b = (_ranks(z, weight) for z in (x, y))
    a, b = (z - (z * weight).sum(1, keepdim=True) / total for z in (a, b))
    squares = [(z**2 * weight).sum(1) for z in (a, b)]
    return (a * b * weight).sum(1) / (squares[0] * squares[1]).sqrt()


def best_threshold(
    lead: Float[Tensor, "n"], human: Int[Tensor, "n"], weight: Float[Tensor, "b n"]
) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
    """Return the weight of right answers at the best threshold, and the threshold."""
    size, right = right_if_first_are_ties(lead, human, weight)
    # Leads of equal size become ties together: a cut is attainable only where the next is larger.
    # Equal scores are ties at any threshold, so the cut "no ties" is never better than the next one
    # if there are equal scores.
    end = torch.ones(1, dtype=torch.bool)
    attainable = torch.cat([end, size[1:] > size[:-1], end])
    best, place = right.masked_fill(~attainable, -1.0).max(1)
    return best, torch.cat([size.new_zeros(1), size])[place]


def right_if_first_are_ties(
    lead: Float[Tensor, "n"], human: Int[Tensor, "n"], weight: Float[Tensor, "b n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "b n+1"]]:
    """Return the sorted |lead|, and the weight that is right if the first 0 ... n count as ties."""
    size, order = lead.double().abs().sort(stable=True)
    weight, human, sign = weight[:, order], human[order], lead[order].sign()
    zero = weight.new_zeros(len(weight), 1)
    ties = torch.cat([zero, (weight * (human == 0)).cumsum(1)], 1)
    ordered = torch.cat([zero, (weight * ((sign == human) & (human != 0))).cumsum(1)], 1)
    return size, ties + ordered[:, -1:] - ordered


def _ranks(x: Tensor, weight: Tensor) -> Tensor:
    values, index = x.unique(return_inverse=True)
    count = weight.new_zeros(len(weight), len(values))
    count.index_add_(1, index, weight)
    return (count.cumsum(1) - (count - 1) / 2)[:, index]


def group_means(
    x: Float[Tensor, "n"], group: Int[Tensor, "n"], weight: Float[Tensor, "b n"]
) -> Float[Tensor, "b g"]:
    """Return the mean over the items of each group, in the order of the ids."""
    ids, index = group.unique(return_inverse=True)
    member = torch.nn.functional.one_hot(index, len(ids)).double()
    return (weight * x.double()) @ member / (weight @ member)


def spread(x: Float[Tensor, "n"], weight: Float[Tensor, "b n"]) -> Float[Tensor, "b"]:
    """Return the standard deviation over items (divided by n)."""
    centre = mean(x, weight)
    return (mean(x.double() ** 2, weight) - centre**2).clamp(min=0).sqrt()


def round_cents(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return values with two decimals, as ImgEdit rounds scores and their means."""
    return x.double().round(decimals=2)


def geometric_mean(scores: Float[Tensor, "n k"]) -> Float[Tensor, "n"]:
    """Return the k-th root of the product of k scores >= 0; VIEScore and GEdit-Bench use k = 2."""
    return scores.double().prod(1) ** (1 / scores.shape[1])


def min_max(
    x: Float[Tensor, "b g"], low: Float[Tensor, "g"], high: Float[Tensor, "g"]
) -> Float[Tensor, "b g"]:
    """Return (x - low) / (high - low), without clipping, as VBench normalises its dimensions."""
    return (x - low) / (high - low)


LEVEL, POWER = 0.05, 0.8
"""Probability of a false positive, and of detecting a difference of the computed size."""


def smallest_difference(methods: Sequence[Sequence[float]]) -> float:
    """Return the smallest true difference of two means that a two-sided t test is likely to detect.

    `methods` are the values of each method's seeds. The test has level 5 % and power 80 %. The
    standard deviation is pooled over all methods. Both compared methods are assumed to have as few
    seeds as the smallest method. NaN if no method has two seeds. The difference is (t_{1-level/2} +
    t_power) s sqrt(2/n), Cohen, "Statistical Power Analysis", 1988. It uses quantiles of the
    central t distribution, so it is slightly too small for few seeds.
    """
    known = [[value for value in values if math.isfinite(value)] for values in methods]
    freedom = sum(len(values) - 1 for values in known if values)
    fewest = min((len(values) for values in known), default=0)
    if not (freedom and fewest):
        return math.nan
    squares = sum((v - sum(values) / len(values)) ** 2 for values in known for v in values)
    error = math.sqrt(squares / freedom) * math.sqrt(2 / fewest)
    return (student_quantile(LEVEL / 2, freedom) + student_quantile(1 - POWER, freedom)) * error

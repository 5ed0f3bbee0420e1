"""Aggregate the item scores of a benchmark to the number that its authors report.

A resample is a weight per item, the number of times that the item was drawn (see `resampling`).
Each function takes b resamples and returns b values; weights of 1 give the reported number. A value
is NaN if a resample contains no relevant item.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.resampling import mean


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

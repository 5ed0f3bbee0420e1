"""Compute advantages from credit: normalise within groups, then weight reward dimensions."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Scale = Literal["group", "batch", "joint", "pooled", "none", "leave_one_out", "given"]
Combine = Literal["sum_of_advantages", "advantage_of_sum"]


def group_center(
    value: Float[Tensor, "n R"],
    group: Int[Tensor, "n"],
    scale: Scale,
    *,
    std_floor: float = 1e-6,
    eps: float = 1e-4,
    correction: int = 0,
) -> Float[Tensor, "n R"]:
    """Return (value - group mean) / (std + eps), with the std of the group, of the batch, or 1.

    "given" returns the values unchanged, because the credit method has normalised them. "joint" and
    "pooled" differ from "group" only in the ids. "leave_one_out" returns the value minus the mean
    of the remaining group, so the baseline does not depend on the sample. Groups with a std of at
    most `std_floor` give exact zeros: they have no signal, and division would amplify rounding.

    Source: "group" is GRPO, arXiv:2402.03300v3; "batch" is Flow-GRPO's global_std; "none" is Dr.
    GRPO, arXiv:2503.20783v2; "leave_one_out" is RLOO, arXiv:2402.14740. correction is 0 in
    Flow-GRPO and 1 in DanceGRPO.
    """
    if scale == "given":
        return value
    _, index = group.unique(return_inverse=True)
    centred = value - group_mean(value, index)
    spread = _group_std(centred, index, correction)
    flat = spread <= std_floor
    if scale == "none":
        return centred.masked_fill(flat, 0.0)
    if scale == "leave_one_out":
        members = torch.bincount(index)[index, None]
        return (centred * members / (members - 1).clamp(min=1)).masked_fill(flat, 0.0)
    if scale == "batch":
        spread = value.std(0, correction=min(correction, len(value) - 1), keepdim=True)
    return (centred / (spread + eps)).masked_fill(flat, 0.0)


def exponential_advantages(
    advantage: Float[Tensor, "B T"], group: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return -exp(-A), and 0 outside `mask` and in groups without a signal.

    All advantages become negative, and the worst samples count most. A group of equal rewards has
    A = 0, which would push all of its samples away, so it stays 0.

    Source: DDRL, arXiv:2512.04332, and code of nvidia-cosmos/cosmos-rl.
    """
    out = torch.zeros_like(advantage)
    chosen, (ids, index) = advantage[mask], group[mask].unique(return_inverse=True)
    signal = chosen.new_zeros(len(ids)).index_add(0, index, chosen.abs())[index] > 0
    out[mask] = torch.where(signal, -torch.exp(-chosen), 0.0)
    return out


def compare_in_groups(value: Float[Tensor, "n R"], group: Int[Tensor, "n"]) -> Float[Tensor, "n R"]:
    """Normalise credit within groups; NaN stays NaN and does not affect other rows."""
    out = torch.full_like(value, torch.nan)
    for dim, column in enumerate(value.unbind(1)):
        known = column.isfinite()
        if known.any():
            out[known, dim] = group_center(column[known, None], group[known], "group")[:, 0]
    return out


def advantages(
    value: Float[Tensor, "B T R"],
    group: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    weights: Float[Tensor, "R"],
    *,
    scale: Scale = "group",
    combine: Combine = "sum_of_advantages",
    std_floor: float = 1e-6,
    correction: int = 0,
) -> Float[Tensor, "B T"]:
    """Return the normalised credit of each transition, summed over dimensions; 0 outside `mask`.

    "sum_of_advantages" normalises each dimension separately and adds the results with `weights`, so
    a dimension's influence does not depend on its spread. "advantage_of_sum" adds the raw values
    with `weights`, then normalises.

    Source: DanceGRPO, arXiv:2505.07818v4 (sum of advantages); Flow-GRPO's code (advantage of sum).
    """
    out = torch.zeros_like(value[..., 0])
    chosen, ids = value[mask], group[mask]
    if len(chosen) == 0:
        return out
    if combine == "advantage_of_sum":
        chosen, weights = (chosen @ weights)[:, None], torch.ones_like(weights[:1])
    centred = group_center(chosen, ids, scale, std_floor=std_floor, correction=correction)
    # Not `centred @ weights`: a matrix product may round equal rows differently.
    out[mask] = (centred * weights).sum(1)
    return out


def group_mean(value: Float[Tensor, "n R"], index: Int[Tensor, "n"]) -> Float[Tensor, "n R"]:
    """Return the mean over the rows with the same index (0, 1, ...), repeated for every row.

    Sums are in float64, so the mean of equal float32 values is exactly the value.
    """
    count = torch.bincount(index)
    total = value.new_zeros(len(count), value.shape[1], dtype=torch.float64)
    return (total.index_add(0, index, value.double()) / count[:, None])[index].to(value.dtype)


def zero_spread_share(
    value: Float[Tensor, "n"], group: Int[Tensor, "n"], std_floor: float = 1e-6
) -> float:
    """Return the share of groups with equal values for all members, which give no signal."""
    ids, index = group.unique(return_inverse=True)
    centred = value[:, None] - group_mean(value[:, None], index)
    flat = _group_std(centred, index, 0)[:, 0] <= std_floor
    return float(torch.zeros(len(ids), device=value.device).scatter_(0, index, flat.float()).mean())


def _group_std(centred: Tensor, index: Tensor, correction: int) -> Tensor:
    members = torch.bincount(index)[index, None]
    variance = group_mean(centred**2, index) * members / (members - correction).clamp(min=1)
    return variance.sqrt()

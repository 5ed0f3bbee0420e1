"""Compute advantages from credit: normalise within groups, then weight reward dimensions.

GARDO chooses the samples that a KL applies to, and shapes advantages by diversity. Source:
arXiv:2512.24138, Eq. (7) and Algorithm 1. The gate in the released code has the opposite sign and
is not followed.

A place is a position of the latent grid, shared by all channels. Advantages of places have the
shape [n, 1, *grid], which broadcasts to latents [n, C, *grid].
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.forward_process import residual_scale
from flowalign.functional.transition import Gaussian, Kernel, per_row

Scale = Literal["group", "batch", "joint", "pooled", "none", "leave_one_out", "given"]
Combine = Literal["sum_of_advantages", "advantage_of_sum"]


def group_center(
    value: Float[Tensor, "n R"],
    group: Int[Tensor, "n"],
    scale: Scale,
    *,
    std_floor: float | None = None,
    eps: float = 1e-4,
    correction: int = 0,
) -> Float[Tensor, "n R"]:
    """Return (value - group mean) / (std + eps), with the std of the group, of the batch, or 1.

    "given" returns the values unchanged, because the credit method has normalised them. "joint" and
    "pooled" differ from "group" only in the ids. "leave_one_out" returns the value minus the mean
    of the remaining group, so the baseline does not depend on the sample. Groups with a std of at
    most `std_floor`, by default the rounding of their values, give exact zeros: they have no
    signal, and division would amplify rounding.

    Source: "group" is GRPO, arXiv:2402.03300v3; "batch" is Flow-GRPO's global_std; "none" is Dr.
    GRPO, arXiv:2503.20783v2; "leave_one_out" is RLOO, arXiv:2402.14740. correction is 0 in
    Flow-GRPO and 1 in DanceGRPO.
    """
    if scale == "given":
        return value
    _, index = group.unique(return_inverse=True)
    centred = value - group_mean(value, index)
    spread = _group_std(centred, index, correction)
    flat = spread <= _floor(value, index, std_floor)
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


def compare_in_groups(
    value: Float[Tensor, "n R"], group: Int[Tensor, "n"], scale: Scale = "group"
) -> Float[Tensor, "n R"]:
    """Normalise credit within groups; NaN stays NaN and does not affect other rows."""
    out = torch.full_like(value, torch.nan)
    for dim, column in enumerate(value.unbind(1)):
        known = column.isfinite()
        if known.any():
            out[known, dim] = group_center(column[known, None], group[known], scale)[:, 0]
    return out


def advantages(
    value: Float[Tensor, "B T R"],
    group: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    weights: Float[Tensor, "R"],
    *,
    scale: Scale = "group",
    combine: Combine = "sum_of_advantages",
    std_floor: float | None = None,
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
    value: Float[Tensor, "n"], group: Int[Tensor, "n"], std_floor: float | None = None
) -> float:
    """Return the share of groups with equal values for all members, which give no signal."""
    ids, index = group.unique(return_inverse=True)
    centred = value[:, None] - group_mean(value[:, None], index)
    floor = _floor(value[:, None], index, std_floor)
    flat = (_group_std(centred, index, 0) <= floor)[:, 0]
    return float(torch.zeros(len(ids), device=value.device).scatter_(0, index, flat.float()).mean())


def _floor(value: Tensor, index: Tensor, std_floor: float | None) -> Tensor | float:
    """Return the largest std without a signal; by default 8 float32 roundings of values."""
    if std_floor is not None:
        return std_floor
    ids = index[:, None].expand_as(value)
    largest = torch.zeros_like(value).scatter_reduce(0, ids, value.abs(), "amax")[index]
    return 8 * torch.finfo(torch.float32).eps * largest


def _group_std(centred: Tensor, index: Tensor, correction: int) -> Tensor:
    members = torch.bincount(index)[index, None]
    variance = group_mean(centred**2, index) * members / (members - correction).clamp(min=1)
    return variance.sqrt()


def win_share(value: Float[Tensor, "n *aux"]) -> Float[Tensor, "n *aux"]:
    """Return the share of the remaining samples with a lower value, in each column."""
    below = (value[None] < value[:, None]).sum(1)
    return below / max(len(value) - 1, 1)


def reward_uncertainty(
    main: Float[Tensor, "n"], auxiliary: Float[Tensor, "n A"]
) -> Float[Tensor, "n"]:
    """Return U = w(main) - mean w(auxiliary), for the share w of the batch that a sample beats.

    U is high where the optimized reward likes a sample more than the auxiliary rewards do. It is 0
    if they order the batch alike. NaN where a reward failed. Without ties its batch mean is 0.
    """
    found = win_share(main) - win_share(auxiliary).mean(1)
    failed = main.isnan() | auxiliary.isnan().any(1)
    return found.masked_fill(failed, torch.nan)


def most_uncertain(uncertainty: Float[Tensor, "n"], share: float) -> Bool[Tensor, "n"]:
    """Return True for samples with U above its (1 - share) quantile; share 1: all samples."""
    if share >= 1:
        return torch.ones_like(uncertainty, dtype=torch.bool)
    return uncertainty > uncertainty.nanquantile(1 - share)


def nearest_distance(features: Float[Tensor, "B D"], group_size: int) -> Float[Tensor, "B"]:
    """Return the cosine distance of each sample to the nearest other sample of its group."""
    unit = torch.nn.functional.normalize(features.float(), dim=1).unflatten(0, (-1, group_size))
    distance = 1 - unit @ unit.transpose(1, 2)
    own = torch.eye(group_size, dtype=torch.bool, device=features.device)
    return distance.masked_fill(own, torch.inf).amin(2).flatten().clamp(min=0)


def favour_diversity(
    advantage: Float[Tensor, "B T"], distance: Float[Tensor, "B"]
) -> Float[Tensor, "B T"]:
    """Return A d where A > 0, else A, for the distance d of a sample to its nearest neighbour."""
    return torch.where(advantage > 0, advantage * distance[:, None], advantage)


def weigh_places(
    advantage: Float[Tensor, "B T"],
    good: Float[Tensor, "B 1 *grid"],
    bad: Float[Tensor, "B 1 *grid"],
    blend: float,
) -> Float[Tensor, "B T 1 *grid"]:
    """Return A ((1 - blend) + blend w), with w = `good` if A > 0, else `bad`.

    Both are weights >= 0 of mean 1 over places, so the mean over places is the advantage A of the
    transition.
    """
    a = _as_places(advantage, good.ndim - 2)
    weight = torch.where(a > 0, good[:, None], bad[:, None])
    return a * ((1 - blend) + blend * weight)


def compare_places(
    maps: Float[Tensor, "B 1 *grid"], group_size: int, std_floor: float = 1e-6
) -> Float[Tensor, "B 1 *grid"]:
    """Return the advantage of each place within its group: (m - mean) / std of the whole batch.

    The mean is over the samples of a group at the same place, and the standard deviation over all
    samples and places. It is 0 everywhere if all maps of a group are equal.
    """
    grouped = maps.unflatten(0, (-1, group_size))
    centred = (grouped - grouped.mean(1, keepdim=True)).flatten(0, 1)
    return centred / maps.std(correction=0).clamp(min=std_floor)


def add_places(
    advantage: Float[Tensor, "B T"], local: Float[Tensor, "B 1 *grid"], blend: float
) -> Float[Tensor, "B T 1 *grid"]:
    """Return (1 - blend) A + blend A_p for the advantages A_p of places."""
    return (1 - blend) * _as_places(advantage, local.ndim - 2) + blend * local[:, None]


def split_places(
    places: Float[Tensor, "n 1 *grid"], advantage: Float[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n 1 *grid"]]:
    """Return one advantage a per sample and weights w of its places, with a w = A_p.

    |a| is the mean of |A_p|, and a has the sign of the sample's own advantage. If all A_p have this
    sign, w has mean 1. Where a is 0, w is 1.
    """
    size = places.flatten(1).abs().mean(1)
    a = torch.where(advantage < 0, -size, size)
    weight = places / per_row(torch.where(a == 0, 1.0, a), places)
    return a, torch.where(per_row(a, places) == 0, 1.0, weight)


def place_log_ratio(
    kernel: Kernel,
    x_next: Float[Tensor, "n C *grid"],
    current: Gaussian,
    mean_old: Float[Tensor, "n C *grid"],
    weight: Float[Tensor, "n 1 *grid"],
) -> Float[Tensor, "n"]:
    """Return mean_p w_p l_p, where l_p is the log-density of place p minus the old one.

    With w = 1 it is the log-ratio of the transition. One ratio per sample keeps the meaning of clip
    ranges, and its gradient at ratio 1 times the advantage a is the gradient of mean_p A_p l_p.
    """
    gain = (x_next - mean_old).square() - (x_next - current.mean).square()
    weighted = (weight * gain).flatten(1).mean(1)
    return weighted if kernel.density == "unit" else weighted / (2 * current.std**2)


def nft_of_places(
    policy: Float[Tensor, "n C *grid"],
    old: Float[Tensor, "n C *grid"],
    sigma: Float[Tensor, "n"],
    optimal: Float[Tensor, "n 1 *grid"],
    beta: float,
) -> Float[Tensor, "n"]:
    """Return `forward_process.nft` with a probability of being optimal for each place.

    The squared error of a place is divided by the scale of the whole row. If `optimal` is equal at
    all places, the value is that of `nft`.
    """
    s, change = per_row(sigma, policy), beta * (policy - old)
    positive = _self_normalised_squares(s * (old + change))
    negative = _self_normalised_squares(s * (old - change))
    return (optimal * positive + (1 - optimal) * negative).flatten(1).mean(1) / beta


def _self_normalised_squares(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
    """Return squares with `self_normalised_error` as their mean over each row."""
    return residual.square() / per_row(residual_scale(residual), residual)


def _as_places(advantage: Float[Tensor, "B T"], num_axes: int) -> Float[Tensor, "B T 1 *grid"]:
    """Return advantages with singleton axes for the channel and the grid."""
    return advantage.reshape(*advantage.shape, 1, *[1] * num_axes)

"""Compute advantages of latent positions, and log-ratios that they weight.

A place is a position of the latent grid, shared by all channels. Advantages of places have the
shape [n, 1, *grid], which broadcasts to latents [n, C, *grid].
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.forward_process import residual_scale
from flowalign.functional.transition import Gaussian, Kernel, per_row


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

"""Construct the off-path states at which SOAR corrects a model, and weight them.

Source: SOAR, arXiv:2604.12617, and code of Tencent-Hunyuan/HY-SOAR.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import per_row


def level_after(
    sigmas: Float[Tensor, "S"], sigma: Float[Tensor, "n"], share: float
) -> Float[Tensor, "n"]:
    """Return the noise levels after `share` of the whole schedule; 0 beyond its end.

    Positions between the levels of the schedule are interpolated linearly in sigma.
    """
    rising = sigmas.flip(0).contiguous()
    upper = torch.searchsorted(rising, sigma.contiguous()).clamp(1, len(rising) - 1)
    low, high = rising[upper - 1], rising[upper]
    place = (upper - 1 + (sigma - low) / (high - low)) / (len(rising) - 1)
    left = ((place - share) * (len(rising) - 1)).clamp(0, len(rising) - 1)
    below = left.floor().long().clamp(max=len(rising) - 2)
    return torch.lerp(rising[below], rising[below + 1], left - below)


def renoise(
    x: Float[Tensor, "n *latent"],
    noise: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "n"],
    higher: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return x, moved from level sigma on a straight line towards the noise to level `higher`.

    x_h = (1 - a) x + a noise with a = (higher - sigma) / (1 - sigma). If x was noised with the same
    noise, x_h is the data noised to `higher`.
    """
    share = ((higher - sigma) / (1 - sigma).clamp(min=1e-12)).clamp(0, 1)
    return torch.lerp(x, noise, per_row(share, x).expand_as(x))


def velocity_to_data(
    x: Float[Tensor, "n *latent"], data: Float[Tensor, "n *latent"], sigma: Float[Tensor, "n"]
) -> Float[Tensor, "n *latent"]:
    """Return (x - data) / sigma, the constant velocity of the straight line from x to the data."""
    return (x - data) / per_row(sigma, x)


def point_weights(num_points: int, weight: float) -> tuple[float, float]:
    """Return the weights of a sample and of each of its extra points, with mean 1 over all rows.

    The mean of weighted errors is then (sum over samples + weight * sum over points) / (number of
    samples + weight * number of points).
    """
    scale = (1 + num_points) / (1 + weight * num_points)
    return scale, weight * scale

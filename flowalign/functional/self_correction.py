"""Construct the points off the data path at which SOAR corrects a model, and weigh them.

Source: SOAR, arXiv:2604.12617, and code of Tencent-Hunyuan/HY-SOAR.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import per_row


def level_after(
    sigmas: Float[Tensor, "S"], sigma: Float[Tensor, "n"], share: float
) -> Float[Tensor, "n"]:
    """Return the noise levels that lie `share` of the whole schedule further on; 0 past its end.

    Between the levels of the schedule its places are linear in sigma.
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
    """Return x at level sigma moved on a straight line towards the noise, to the level `higher`.

    x_h = (1 - a) x + a noise with a = (higher - sigma) / (1 - sigma). For x that was noised by this
    very noise, it is the state noised to `higher`.
    """
    share = ((higher - sigma) / (1 - sigma).clamp(min=1e-12)).clamp(0, 1)
    return torch.lerp(x, noise, per_row(share, x).expand_as(x))


def velocity_to_data(
    x: Float[Tensor, "n *latent"], data: Float[Tensor, "n *latent"], sigma: Float[Tensor, "n"]
) -> Float[Tensor, "n *latent"]:
    """Return (x - data) / sigma, the constant velocity of the straight line from x to the data."""
    return (x - data) / per_row(sigma, x)


def point_weights(num_points: int, weight: float) -> tuple[float, float]:
    """Return the weights of a sample and of each of its points, whose mean over all rows is 1.

    The mean of weighted errors is then (sum of samples + weight * sum of points) / (number of
    samples + weight * number of points).
    """
    scale = (1 + num_points) / (1 + weight * num_points)
    return scale, weight * scale

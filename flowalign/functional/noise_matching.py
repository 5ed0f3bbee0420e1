"""Noise clean latents, and compute the error of a network's prediction.

A residual is prediction - target; an error is the mean of its square. At fixed x_sigma, residuals
of velocity, noise, data and variance-preserving v differ only by factors of sigma. Changing the
space therefore only reweights the noise levels.

SOAR corrects a model at off-path states and weights them. Source: arXiv:2604.12617, and code of
Tencent-Hunyuan/HY-SOAR.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import flow_std, per_row

Space = Literal["velocity", "noise", "data", "v"]
"""Space of the squared residuals. velocity: flow matching. noise: epsilon prediction, as in SD1.5
and SDXL. data: x0 prediction. v: prediction of v = alpha noise - s data."""


def add_noise(
    x0: Float[Tensor, "n *latent"], noise: Float[Tensor, "n *latent"], sigma: Float[Tensor, "n"]
) -> Float[Tensor, "n *latent"]:
    """Return the noised latents (1 - sigma) x0 + sigma noise."""
    s = per_row(sigma, x0)
    return (1 - s) * x0 + s * noise


def step_at(sigma: Float[Tensor, "m"], sigmas: Float[Tensor, "S"]) -> Int[Tensor, "m"]:
    """Return the denoising step k of each noise level, with sigmas[k] >= sigma > sigmas[k + 1].

    A level of the schedule belongs to the step that starts at it, because the step's velocity was
    evaluated there. Levels above the first level belong to the first step, the last level to the
    last step.
    """
    k = (sigmas[:, None] >= sigma).sum(0) - 1
    return k.clamp(0, len(sigmas) - 2)


def space_factor(space: Space, sigma: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return the factor that turns a velocity residual into a residual of another space.

    noise - noise_hat = (1 - sigma) (v - v_hat), and data - data_hat = -sigma (v - v_hat). The
    residual of variance-preserving v is the noise residual divided by alpha, where
    alpha : s = (1 - sigma) : sigma and alpha^2 + s^2 = 1. Signs are dropped, because residuals are
    squared.
    """
    if space == "velocity":
        return torch.ones_like(sigma)
    if space == "noise":
        return 1 - sigma
    if space == "data":
        return sigma
    return flow_std(sigma)


def sample_error(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n"]:
    """Return the mean square over all axes except rows."""
    return residual.square().flatten(1).mean(1)


def frame_error(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n F"]:
    """Return the mean square per latent frame, [n, C, F, H, W] -> [n, F]; images have one frame."""
    squared = residual.square()
    if residual.ndim == 5:
        return squared.mean((1, 3, 4))
    return squared.flatten(1).mean(1, keepdim=True)


def masked_error(
    residual: Float[Tensor, "n *latent"], mask: Float[Tensor, "n *mask"]
) -> Float[Tensor, "n"]:
    """Return the mean square weighted by the mask, sum(mask e) / sum(mask) per row.

    A row with a mask of zeros has error 0.

    Source: Local-DPO's normalisation, error * mask * numel / sum(mask), but with the sum per row
    instead of over the batch.
    """
    mask = mask.expand_as(residual)
    total = mask.flatten(1).sum(1)
    summed = (residual.square() * mask).flatten(1).sum(1)
    return summed / total.where(total > 0, torch.ones_like(total))


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

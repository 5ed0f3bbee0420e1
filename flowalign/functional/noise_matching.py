"""Noise clean latents, and measure by how much a network's prediction misses its target.

A residual is prediction - target; an error is the mean of its square. The velocity residual at
fixed x_sigma is the residual of the noise, of the data and of the v of a variance-preserving
process up to factors of sigma: changing the space reweighs the times.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import per_row

Space = Literal["velocity", "noise", "data", "v"]
"""Space in which squared residuals are taken. velocity: flow matching. noise: epsilon prediction,
of SD1.5 and SDXL. data: x0 prediction. v: prediction of v = alpha noise - s data."""


def add_noise(
    x0: Float[Tensor, "n *latent"], noise: Float[Tensor, "n *latent"], sigma: Float[Tensor, "n"]
) -> Float[Tensor, "n *latent"]:
    """Return the noised latents (1 - sigma) x0 + sigma noise."""
    s = per_row(sigma, x0)
    return (1 - s) * x0 + s * noise


def step_at(sigma: Float[Tensor, "m"], sigmas: Float[Tensor, "S"]) -> Int[Tensor, "m"]:
    """Return the denoising step at each noise level, k where sigmas[k] >= sigma > sigmas[k + 1].

    A level of the schedule belongs to the step that starts there, whose velocity was evaluated at
    it. Above the first level it is the first step, at the last level the last step.
    """
    k = (sigmas[:, None] >= sigma).sum(0) - 1
    return k.clamp(0, len(sigmas) - 2)


def space_factor(space: Space, sigma: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return the factor that turns a velocity residual into a residual of another space.

    With alpha : s = (1 - sigma) : sigma, alpha^2 + s^2 = 1: noise - noise_hat = (1 - sigma)(v -
    v_hat), data - data_hat = -sigma (v - v_hat), and the v of a variance-preserving process has the
    noise residual divided by alpha. Signs do not matter to squares and are left out.
    """
    if space == "velocity":
        return torch.ones_like(sigma)
    if space == "noise":
        return 1 - sigma
    if space == "data":
        return sigma
    return ((1 - sigma) ** 2 + sigma**2).sqrt()


def sample_error(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n"]:
    """Return the mean square over everything but rows, whatever the number of axes."""
    return residual.square().flatten(1).mean(1)


def frame_error(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n F"]:
    """Return the mean square per latent frame, [n, C, F, H, W] to [n, F]; images have one frame."""
    squared = residual.square()
    if residual.ndim == 5:
        return squared.mean((1, 3, 4))
    return squared.flatten(1).mean(1, keepdim=True)


def masked_error(
    residual: Float[Tensor, "n *latent"], mask: Float[Tensor, "n *mask"]
) -> Float[Tensor, "n"]:
    """Return the mean square weighted by the mask, sum(mask e) / sum(mask) per row.

    Source: Local-DPO's normalisation, error * mask * numel / sum(mask), with the sum of each row
    instead of the batch's. A row whose mask is 0 everywhere has error 0.
    """
    mask = mask.expand_as(residual)
    total = mask.flatten(1).sum(1)
    summed = (residual.square() * mask).flatten(1).sum(1)
    return summed / total.where(total > 0, torch.ones_like(total))

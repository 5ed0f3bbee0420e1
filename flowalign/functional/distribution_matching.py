"""Distil a sampler of few steps by matching the distributions along its trajectories (TDM, TDM-R1).

A deterministic sampler of K steps passes K *boundaries*: the states after each step, at noise level
m, which are data x0_hat and noise n with x_m = (1 - m) x0_hat + m n. A boundary is noised further,
to t > m; there the data that the real model, the fake one and others predict are compared, and
x0_hat moves by their difference.

Source: TDM-R1, arXiv:2603.07700, and TDM, arXiv:2503.06674, as Flow-Factory implements them; their
own training code was not read.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.transition import per_row

_LEAST = 1e-6
"""Lower bound of a mean distance by which a loss is divided."""


def boundary(
    x: Float[Tensor, "n *latent"], v: Float[Tensor, "n *latent"], sigma: Float[Tensor, ""]
) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n *latent"]]:
    """Return the data x - sigma v and the noise x + (1 - sigma) v that a velocity predicts.

    Every Euler step from x along v leads to a mixture of these two.
    """
    return x - sigma * v, x + (1 - sigma) * v


def renoise_boundary(
    noise: Float[Tensor, "n *latent"],
    fresh: Float[Tensor, "n *latent"],
    m: Float[Tensor, ""],
    t: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return the noise of a boundary of level m after it is noised to t >= m, with unit variance.

    With rho = (1 - t) / (1 - m) it is (rho m n + sqrt(t^2 - (rho m)^2) f) / t, so that (1 - t)
    x0_hat + t times it is rho x_m and fresh noise f. At t = m it is n itself, at m = 0 it is f.
    """
    remaining = (1 - t) / (1 - m) * m
    added = (t.square() - remaining.square()).clamp(min=0).sqrt()
    return per_row(remaining / t, noise) * noise + per_row(added / t, noise) * fresh


def importance(
    noise: Float[Tensor, "n *latent"], fresh: Float[Tensor, "n *latent"], largest: float
) -> Float[Tensor, "n"]:
    """Return exp(mean(f^2) / 2 - mean(noise^2) / 2), at most `largest`.

    It is the density of the noise used over that of the fresh noise, to the power 1 / elements: 1
    to within a few per cent for real latents.
    """
    log_ratio = (fresh.square() - noise.square()).flatten(1).mean(1) / 2
    return log_ratio.exp().clamp(max=largest)


def signal_to_noise(t: Float[Tensor, "n"], largest: float) -> Float[Tensor, "n"]:
    """Return ((1 - t) / t)^2, at most `largest`."""
    return ((1 - t) / t).square().clamp(max=largest)


def moved_data_loss(
    x0_hat: Float[Tensor, "n *latent"],
    direction: Float[Tensor, "n *latent"],
    normaliser: Float[Tensor, "n *latent"],
    huber: float | None = None,
) -> Float[Tensor, "n"]:
    """Return half the mean square between x0_hat and sg(x0_hat + direction), over a distance.

    The distance is mean |x0_hat - normaliser|, constant. With `huber`, c, a square d^2 / 2 becomes
    sqrt(d^2 + c^2) - c, whose gradient is bounded.
    """
    delta = x0_hat - (x0_hat + direction).detach()
    each = delta.square() / 2 if huber is None else (delta.square() + huber**2).sqrt() - huber
    distance = (x0_hat - normaliser).detach().abs().flatten(1).mean(1).clamp(min=_LEAST)
    return each.flatten(1).mean(1) / distance


def mask_runaways(
    error: Float[Tensor, "n"],
    reference: Float[Tensor, "n"],
    advantage: Float[Tensor, "n"],
    limit: float,
) -> Bool[Tensor, "n"]:
    """Return True where an error has moved the way of its advantage, and (l - l_ref)^2 > limit."""
    change = (error - reference).detach()
    return (advantage * change < 0) & (change.square() > limit)


def levels_above(
    uniform: Float[Tensor, "n"], m: Float[Tensor, ""], highest: Float[Tensor, ""]
) -> Float[Tensor, "n"]:
    """Return the noise levels that numbers in [0, 1) choose between m and a level above it."""
    return m + (highest - m) * torch.as_tensor(uniform).clamp(min=1e-3)

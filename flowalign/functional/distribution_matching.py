"""Distil a few-step sampler by matching the distributions along its trajectories (TDM, TDM-R1).

A deterministic sampler of K steps passes K *boundaries*, the states after each step. A boundary at
noise level m consists of data x0_hat and noise n with x_m = (1 - m) x0_hat + m n. It is noised
further, to t > m. There the data predictions of the real model, the fake model and further models
are compared, and x0_hat moves by their difference.

Source: TDM-R1, arXiv:2603.07700, and TDM, arXiv:2503.06674, as implemented in Flow-Factory. We have
not read the authors' training code.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.transition import per_row

_LEAST = 1e-6
"""Lower bound of the mean distance that divides a loss."""


def boundary(
    x: Float[Tensor, "n *latent"], v: Float[Tensor, "n *latent"], sigma: Float[Tensor, ""]
) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n *latent"]]:
    """Return the data x - sigma v and the noise x + (1 - sigma) v that a velocity predicts.

    Every Euler step from x along v leads to a mixture of this data and this noise.
    """
    return x - sigma * v, x + (1 - sigma) * v


def renoise_boundary(
    noise: Float[Tensor, "n *latent"],
    fresh: Float[Tensor, "n *latent"],
    m: Float[Tensor, ""],
    t: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return the unit-variance noise of a boundary at level m after noising it to t >= m.

    With rho = (1 - t) / (1 - m), the noise is n_t = (rho m n + sqrt(t^2 - (rho m)^2) f) / t for
    fresh noise f, so (1 - t) x0_hat + t n_t is rho x_m plus fresh noise. At t = m it is n, and at
    m = 0 it is f.
    """
    remaining = (1 - t) / (1 - m) * m
    added = (t.square() - remaining.square()).clamp(min=0).sqrt()
    return per_row(remaining / t, noise) * noise + per_row(added / t, noise) * fresh


def importance(
    noise: Float[Tensor, "n *latent"], fresh: Float[Tensor, "n *latent"], largest: float
) -> Float[Tensor, "n"]:
    """Return exp(mean(fresh^2) / 2 - mean(noise^2) / 2), at most `largest`.

    It is the density ratio of the used noise and the fresh noise to the power 1 / elements. For
    real latents it is within a few per cent of 1.
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
    """Return half the mean square of x0_hat - sg(x0_hat + direction), divided by a distance.

    The distance is mean |x0_hat - normaliser|, without gradient. With `huber` = c, each square
    d^2 / 2 becomes sqrt(d^2 + c^2) - c, which has a bounded gradient.
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
    """Return True where an error l followed its advantage too far: (l - l_ref)^2 > limit."""
    change = (error - reference).detach()
    return (advantage * change < 0) & (change.square() > limit)


def levels_above(
    uniform: Float[Tensor, "n"], m: Float[Tensor, ""], highest: Float[Tensor, ""]
) -> Float[Tensor, "n"]:
    """Return noise levels between m and `highest`, chosen by `uniform` numbers in [0, 1)."""
    return m + (highest - m) * torch.as_tensor(uniform).clamp(min=1e-3)

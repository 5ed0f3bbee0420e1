"""Express variance-preserving discrete-time diffusion models in flow coordinates.

A discrete-time model is defined on states x_vp = alpha_t data + s_t noise, with
alpha_t^2 = alphas_cumprod[t] and s_t^2 = 1 - alpha_t^2. With s_t / alpha_t = sigma / (1 - sigma),
the flow state at sigma is

    x = (1 - sigma) data + sigma noise = x_vp / (alpha + s).

Both states have the same data and noise. A deterministic DDIM step is an Euler step in s / alpha,
and therefore equals the Euler step of the flow.

Source: DDIM, arXiv:2010.02502v4, Eq. (13), for the step in s / alpha.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import flow_std, per_row

Prediction = Literal["epsilon", "v_prediction", "sample"]
"""Prediction of a network. epsilon: noise. v_prediction: alpha noise - s data. sample: data."""


def flow_sigmas(alphas_cumprod: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
    """Return the increasing flow times s / (alpha + s) of the model's times 0 ... S - 1."""
    alpha, s = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
    return s / (alpha + s)


def even_times(num_steps: int, num_times: int) -> Int[Tensor, "S"]:
    """Return `num_steps` evenly spaced times of 0 ... num_times - 1, descending from the last.

    Source: the "trailing" spacing of Lin et al. 2023, arXiv:2305.08891, Table 2. Other spacings
    start below the last time, or stop at time 0 instead of at the data.
    """
    if not 1 <= num_steps <= num_times:
        raise ValueError(
            f"number of steps is {num_steps}; it must be from 1 to {num_times}, the model's times"
        )
    gap = num_times / num_steps
    times = num_times - gap * torch.arange(num_steps, dtype=torch.float64)
    return times.round().long() - 1


def fractional_time(sigma: Float[Tensor, "n"], table: Float[Tensor, "S"]) -> Float[Tensor, "n"]:
    """Return the model time of a flow time: k at table[k], and linear in s / alpha in between.

    Flow times outside the table are clamped to the table.
    """
    sigma = sigma.clamp(table[0], table[-1])
    above = torch.searchsorted(table, sigma).clamp(min=1)
    low, high = table[above - 1], table[above]
    share = (sigma - low) * (1 - high) / ((high - low) * (1 - sigma))
    return above - 1 + torch.where(sigma == high, 1.0, share)


def preserving_state(
    x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "n"]
) -> Float[Tensor, "n *latent"]:
    """Return x_vp = x (alpha + s), which has variance 1 if data and noise have variance 1."""
    return x / per_row(flow_std(sigma), x)


def flow_velocity(
    kind: Prediction,
    prediction: Float[Tensor, "n *latent"],
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Convert a prediction of noise, v or data at flow state x to the velocity noise - data.

    The kind epsilon diverges at sigma = 1, where the state is pure noise; sample at sigma = 0.
    """
    t = per_row(sigma, x)
    if kind == "epsilon":
        return (prediction - x) / (1 - t)
    if kind == "sample":
        return (x - prediction) / t
    n = per_row(flow_std(sigma), x)
    return prediction / n + (2 * t - 1) * x / n**2

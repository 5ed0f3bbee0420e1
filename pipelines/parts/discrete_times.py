"""Derives flow schedules and velocities from diffusion models with discrete timesteps."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.diffusion import (
    even_times,
    flow_sigmas,
    flow_velocity,
    fractional_time,
    preserving_state,
)


def trailing_sigmas(scheduler: Any, num_steps: int) -> Float[Tensor, "S"]:
    """Return the flow sigmas of evenly spaced timesteps that start at the last one, then 0."""
    table = _table(scheduler)
    return torch.cat([table[even_times(num_steps, len(table))], table.new_zeros(1)])


def predict_flow(
    scheduler: Any,
    predict: Callable[[Tensor, Tensor], Tensor],
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return the velocity at flow states x.

    `predict` maps diffusion states and timesteps to the network's output.
    """
    times = fractional_time(sigma, _table(scheduler).to(x.device))
    prediction = predict(preserving_state(x, sigma), times)
    return flow_velocity(scheduler.config.prediction_type, prediction, x, sigma)


def _table(scheduler: Any) -> Float[Tensor, "times"]:
    """Return the flow sigma of each timestep, computed in the scheduler's precision."""
    return flow_sigmas(scheduler.alphas_cumprod).float()

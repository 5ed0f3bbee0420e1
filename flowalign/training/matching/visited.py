"""Express visited states as noised samples, and read the steps that were taken from them."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.noise_matching import step_at, velocity_to_data
from flowalign.functional.transition import mean_sensitivity, transition, travelled_velocity
from flowalign.types import Trajectory


def noise_of(
    trajectory: Trajectory, samples: Int[Tensor, "m"], sigma: Float[Tensor, "m"]
) -> Float[Tensor, "m *latent"]:
    """Return the noise that turns each sample into its visited state at sigma.

    From x = (1 - sigma) x0 + sigma noise follows noise = x0 + (x - x0) / sigma.
    """
    x0 = trajectory.state(trajectory.num_steps, samples)
    x = torch.empty_like(x0)
    for k, rows in _by_step(trajectory, sigma):
        x[rows] = trajectory.state(k, samples[rows])
    return x0 + velocity_to_data(x, x0, sigma.to(x))


def steps_from(
    trajectory: Trajectory, samples: Int[Tensor, "m"], sigma: Float[Tensor, "m"]
) -> dict[str, Tensor]:
    """Return columns of the sampled steps at the given levels; none if one was deterministic.

    The mean of a step is linear in the velocity: mean_a - mean_b = slope * (v_a - v_b).
    """
    steps = list(_by_step(trajectory, sigma))
    if not all(bool((trajectory.eta[samples[rows], k] > 0).all()) for k, rows in steps):
        return {}
    x0 = trajectory.state(trajectory.num_steps, samples)
    travelled, numbers = torch.empty_like(x0), x0.new_empty(4, len(x0))
    kernel, sigmas = trajectory.kernel, trajectory.sigmas
    for k, rows in steps:
        some = samples[rows]
        eta = trajectory.eta[some.to(trajectory.eta.device), k]
        x, x_next = trajectory.state(k, some), trajectory.state(k + 1, some)
        travelled[rows] = travelled_velocity(kernel, x, x_next, sigmas, k, eta)
        std = transition(kernel, x, torch.zeros_like(x), sigmas, k, eta).std
        slope = mean_sensitivity(kernel, sigmas, k, eta)
        dt = (sigmas[k] - sigmas[k + 1]).expand_as(std)
        numbers[:, rows] = torch.stack([slope, std, dt, trajectory.logp[some, k].to(std)])
    names = "slope", "std", "dt", "logp_old"
    return {"travelled": travelled, **dict(zip(names, numbers, strict=True))}


def _by_step(
    trajectory: Trajectory, sigma: Float[Tensor, "m"]
) -> Iterator[tuple[int, Int[Tensor, "_"]]]:
    """Yield each denoising step that starts at one of the levels, and its rows."""
    at = step_at(sigma.cpu(), trajectory.sigmas.cpu())
    for k in at.unique().tolist():
        yield k, (at == k).nonzero()[:, 0]

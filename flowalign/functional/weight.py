"""Weight each denoising step in the policy loss."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.transition import Kernel, mean_sensitivity

StepWeight = Literal["uniform", "std", "dt", "inverse_dt", "inverse_sensitivity", "proportional"]


def step_weights(
    kind: StepWeight | Sequence[float],
    kernel: Kernel,
    sigmas: Float[Tensor, "S"],
    eta: Float[Tensor, "T"],
    trained: Bool[Tensor, "T"],
) -> Float[Tensor, "T"]:
    """Return the factor on the loss of each step; 0 for steps that are not trained.

    - uniform: 1.
    - std: the std of the step (noise-aware weight of TempFlow-GRPO, arXiv:2508.04324).
    - dt: the length of the step.
    - inverse_dt: 1 / length (GRPO-Guard, arXiv:2510.22319v1).
    - inverse_sensitivity: 1 / |d mean / d v| (PRECISE's Guard).
    - proportional: makes the gradient of each step proportional to its length, and keeps the sum of
      the native weights |d mean / d v| / std (PCPO, arXiv:2509.25774).
    - numbers: one factor per denoising step.

    std and dt are scaled to mean 1 over trained steps.
    """
    if not isinstance(kind, str):
        return torch.where(trained, torch.tensor(kind, device=eta.device), 0.0)
    if kind not in get_args(StepWeight):
        raise ValueError(
            f"step weight {kind!r} unknown; choose from {', '.join(get_args(StepWeight))}"
        )
    dt = sigmas[:-1] - sigmas[1:]
    steps = [kernel.coefficients(sigmas, k, eta[k : k + 1]).std for k in range(len(dt))]
    std = torch.where(trained, torch.cat(steps), 1.0)
    kappa = torch.cat([mean_sensitivity(kernel, sigmas, k, eta[k : k + 1]) for k in range(len(dt))])
    native = kappa.abs() / std
    weight = {
        "uniform": torch.ones_like(dt),
        "std": std / std[trained].mean(),
        "dt": dt / dt[trained].mean(),
        "inverse_dt": 1 / dt,
        "inverse_sensitivity": 1 / kappa.abs(),
        "proportional": native[trained].sum() / dt[trained].sum() * dt / native,
    }[kind]
    return torch.where(trained, weight, 0.0)

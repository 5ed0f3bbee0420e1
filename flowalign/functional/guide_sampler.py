"""Guide samplers along the gradient of a reward of noisy latents."""

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import NOISE


def reward_gradient(
    reward: Float[Tensor, "n"], x: Float[Tensor, "n *latent"]
) -> Float[Tensor, "n *latent"]:
    """Return the gradient of each sample's reward with respect to x, which requires a gradient."""
    return torch.autograd.grad(reward.sum(), x)[0]


def nrg_velocity(
    gradient: Float[Tensor, "n *latent"], sigma: Float[Tensor, ""], scale: float
) -> Float[Tensor, "n *latent"]:
    """Return the velocity correction of Flow-NRG, -scale * sigma / (1 - sigma) * gradient.

    At pure noise the factor is singular, so the correction is 0.

    Source: Flow-NRG, arXiv:2501.13918.
    """
    if sigma > NOISE:
        return torch.zeros_like(gradient)
    return -scale * sigma / (1 - sigma) * gradient

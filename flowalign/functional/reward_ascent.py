"""Follow the rewards of latents: guide samplers, optimise latents, and move clean predictions.

Source of the optimisation by score distillation, with noises weighted by the rewards they lead to:
RewardSDS, arXiv:2503.09601; its code, itaychachy/RewardSDS. DiffusionOPSD moves clean predictions
along a reward gradient, within a ball.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import NOISE, per_row


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


NoiseWeighting = Literal["min_max", "best", "softmax", "none"]
"""Weighting of the noises of a latent. min_max: 0.9 times the mean of the two best noises minus 0.1
times the mean of the two worst, the authors' recommendation. best: only the best noise. softmax:
softmax of the rewards. none: equal weights, which is score distillation without a reward
(DreamFusion, arXiv:2209.14988)."""
FEWEST_NOISES: dict[NoiseWeighting, int] = {"min_max": 4, "best": 1, "softmax": 1, "none": 1}
_EXTREMES, _TOWARDS, _AWAY = 2, 0.9, 0.1


def noise_weights(reward: Float[Tensor, "n N"], weighting: NoiseWeighting) -> Float[Tensor, "n N"]:
    """Return the weights of the N noises of each latent, from the rewards they lead to.

    Raises:
        ValueError: The weighting needs more noises.
    """
    num_noises = reward.shape[1]
    if num_noises < (fewest := FEWEST_NOISES[weighting]):
        raise ValueError(
            f"the weighting {weighting} needs at least {fewest} noises, got {num_noises}"
        )
    if weighting == "softmax":
        return reward.softmax(1)
    if weighting == "none":
        return torch.full_like(reward, 1 / num_noises)
    best, weights = reward.argsort(dim=1, descending=True, stable=True), torch.zeros_like(reward)
    if weighting == "best":
        return weights.scatter(1, best[:, :1], 1.0)
    weights = weights.scatter(1, best[:, :_EXTREMES], _TOWARDS / _EXTREMES)
    return weights.scatter(1, best[:, -_EXTREMES:], -_AWAY / _EXTREMES)


def distillation_gradient(
    v: Float[Tensor, "n *latent"],
    x0: Float[Tensor, "n *latent"],
    noise: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return s^2 (predicted noise - noise), the gradient of score distillation at x_sigma.

    The velocity v predicts the noise x_sigma + (1 - sigma) v, with the error
    (1 - sigma) (v - (noise - x0)). s^2 = sigma^2 / ((1 - sigma)^2 + sigma^2) is 1 - alpha-bar of
    the variance-preserving process with the same signal-to-noise ratio.
    """
    s, share = per_row(sigma, x0), per_row(variance_share(sigma), x0)
    return share * (1 - s) * (v - (noise - x0))


def variance_share(sigma: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return the share of noise in the variance of (1 - sigma) x0 + sigma noise."""
    return sigma**2 / ((1 - sigma) ** 2 + sigma**2)


_TINY = 1e-12
"""Added to the norm that divides a gradient, from the code of DiffusionOPSD."""

Gradient = Callable[[Tensor], Tensor]
"""Function that returns the gradient of each row's reward in its clean latent."""


def ascend_and_descend(
    clean: Float[Tensor, "n *latent"], gradient: Gradient, steps: int, radius: float, share: float
) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n *latent"]]:
    """Return the displacements of `clean` up and down the reward, after `steps` steps each.

    A step has length share * r / steps along the normalised gradient, where r = radius * ||clean||.
    After each step, the displacement is projected onto the ball of radius r. Both directions share
    the first gradient, so `gradient` is called 2 * steps - 1 times.

    Source: DiffusionOPSD, arXiv:2608.24646, and its code.
    """
    ball = radius * _norm(clean)
    first = gradient(clean)
    up, down = (
        _move(clean, sign, first, gradient, steps, ball, share * ball / steps) for sign in (1, -1)
    )
    return up, down


def _move(
    clean: Float[Tensor, "n *latent"],
    sign: int,
    direction: Float[Tensor, "n *latent"],
    gradient: Gradient,
    steps: int,
    ball: Float[Tensor, "n"],
    length: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return the displacement of one sign, whose first step is along `direction`."""
    moved = torch.zeros_like(clean)
    for m in range(steps):
        g = direction if m == 0 else gradient(clean + moved)
        moved = moved + sign * per_row(length / (_norm(g) + _TINY), g) * g
        moved = moved * per_row((ball / _norm(moved).clamp(min=_TINY)).clamp(max=1), moved)
    return moved


def _norm(x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n"]:
    """Return the Euclidean norm of each row."""
    return x.flatten(1).norm(dim=1)

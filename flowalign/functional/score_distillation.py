"""Optimise latents by score distillation, with noises weighted by the rewards they lead to.

Source: RewardSDS, arXiv:2503.09601; its code, itaychachy/RewardSDS.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import per_row

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

"""Policy objectives and divergences: one number per sample, reduction is the caller's."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.transition import Gaussian


def ppo_clip(
    log_ratio: Float[Tensor, "n"],
    advantage: Float[Tensor, "n"],
    clip: float | Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """-min(r A, clip(r, 1 - clip, 1 + clip) A) with r = pi / pi_old.

    Source: PPO, arXiv:1707.06347v2, Eq. (7).
    """
    ratio, one = log_ratio.exp(), torch.ones_like(log_ratio)
    clipped = ratio.clamp(one - clip, one + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def reward_clip(
    advantage: Float[Tensor, "n"], low: float, high: float, sensitivity: float
) -> Float[Tensor, "n"]:
    """low + (high - low) tanh(sensitivity |A|): what stands out may move further.

    Source: Dynamic-TreeRPO, arXiv:2509.23352v3, known to us from reviews only: that its clip range
    depends on the reward, by a sensitivity and two limits. The function is our reconstruction.
    """
    return low + (high - low) * (sensitivity * advantage.abs()).tanh()


def travelled_mse(
    mean: Float[Tensor, "n *latent"],
    x_next: Float[Tensor, "n *latent"],
    sensitivity: Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """mean((v - v_travelled)^2), where v_travelled is the velocity whose mean is x_next.

    mean - x_next = sensitivity (v - v_travelled) with sensitivity = d mean / d v, so it costs no
    evaluation of the network.
    """
    return _square(mean, x_next) / sensitivity**2


def ratio_norm(
    log_ratio: Float[Tensor, "n"],
    mean: Float[Tensor, "n *latent"],
    mean_old: Float[Tensor, "n *latent"],
    std: Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """std * (log r + mean(|mean - mean_old|^2) / (2 std^2)).

    A log-ratio without bias and step-dependent scale.

    What is left is -mean((mean_old - mean) * noise), so clipping acts alike on every step.

    Source: GRPO-Guard, arXiv:2510.22319v1, RatioNorm.
    """
    return std * (log_ratio + _square(mean, mean_old) / (2 * std**2))


def log_hinge(
    log_ratio: Float[Tensor, "n"], advantage: Float[Tensor, "n"], margin: float
) -> Float[Tensor, "n"]:
    """max(0, margin |A| - A log r): linear until log r has moved by `margin` the right way.

    Source: PCPO, arXiv:2509.25774, its log-hinge objective.
    """
    return (margin * advantage.abs() - advantage * log_ratio).clamp(min=0)


def divergence_mask(
    log_ratio: Float[Tensor, "n"],
    advantage: Float[Tensor, "n"],
    divergence: Float[Tensor, "n"],
    threshold: float,
) -> Bool[Tensor, "n"]:
    """False where the policy is `threshold` from the old one and the update would push it further.

    Source: Flow-DPPO, arXiv:2606.11025v1, with `gaussian_kl` to the old policy as the divergence.
    """
    further = ((log_ratio > 0) & (advantage > 0)) | ((log_ratio < 0) & (advantage < 0))
    return ~((divergence >= threshold) & further)


def gaussian_kl(p: Gaussian, q: Gaussian) -> Float[Tensor, "n"]:
    """KL(p || q) for equal std, averaged over latent elements: mean((mu_p - mu_q)^2) / (2 std^2).

    Source: Flow-GRPO, arXiv:2505.05470v5, its KL term as printed.
    """
    return _square(p.mean, q.mean) / (2 * p.std**2)


def gaussian_kl_no_dt(p: Gaussian, q: Gaussian, dt: Float[Tensor, ""]) -> Float[Tensor, "n"]:
    """`gaussian_kl` times the step length, about ten times weaker: as in Flow-GRPO's released code.

    Published coefficients (0.04, 0.01) belong to this one. dt is sigma - sigma_next > 0.
    """
    return gaussian_kl(p, q) * dt


def latent_mse(p: Gaussian, q: Gaussian) -> Float[Tensor, "n"]:
    """mean((mu_p - mu_q)^2): the KL used together with the "unit" density of CPS."""
    return _square(p.mean, q.mean)


def _square(a: Tensor, b: Tensor) -> Float[Tensor, "n"]:
    return (a - b).square().flatten(1).mean(1)

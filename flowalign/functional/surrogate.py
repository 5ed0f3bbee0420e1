"""Compute policy objectives and divergences, one number per sample; the caller reduces them."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import Gaussian, Kernel, mean_sensitivity


def ppo_clip(
    log_ratio: Float[Tensor, "n"], advantage: Float[Tensor, "n"], clip: float | Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return -min(r A, clip(r, 1 - clip, 1 + clip) A) with r = pi / pi_old.

    Source: PPO, arXiv:1707.06347v2, Eq. (7).
    """
    ratio, one = log_ratio.exp(), torch.ones_like(log_ratio)
    clipped = ratio.clamp(one - clip, one + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def reward_clip(
    advantage: Float[Tensor, "n"], low: float, high: float, sensitivity: float
) -> Float[Tensor, "n"]:
    """Return the clip range low + (high - low) tanh(sensitivity |A|), wider for large advantages.

    Source: Dynamic-TreeRPO, arXiv:2509.23352v3; a reconstruction. From reviews we only know that
    the clip range depends on the reward, with a sensitivity and two limits.
    """
    return low + (high - low) * (sensitivity * advantage.abs()).tanh()


def ratio_norm(
    log_ratio: Float[Tensor, "n"],
    mean: Float[Tensor, "n *latent"],
    mean_old: Float[Tensor, "n *latent"],
    std: Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Return the normalised log-ratio std * (log r + mean(|mean - mean_old|^2) / (2 std^2)).

    This removes the bias of the log-ratio and its step-dependent scale. The result is
    -mean((mean_old - mean) * noise), so one clip range has the same effect on every step.

    Source: GRPO-Guard, arXiv:2510.22319v1, RatioNorm.
    """
    return std * (log_ratio + sample_error(mean - mean_old) / (2 * std**2))


def log_hinge(
    log_ratio: Float[Tensor, "n"], advantage: Float[Tensor, "n"], margin: float
) -> Float[Tensor, "n"]:
    """Return max(0, margin |A| - A log r), linear until log r moved by `margin` in A's direction.

    Source: the log-hinge objective of PCPO, arXiv:2509.25774.
    """
    return (margin * advantage.abs() - advantage * log_ratio).clamp(min=0)


def divergence_mask(
    log_ratio: Float[Tensor, "n"],
    advantage: Float[Tensor, "n"],
    divergence: Float[Tensor, "n"],
    threshold: float,
) -> Bool[Tensor, "n"]:
    """Return False where the policy is `threshold` away from the old and would move further away.

    Source: Flow-DPPO, arXiv:2606.11025v1, with `gaussian_kl` to the old policy as the divergence.
    """
    further = ((log_ratio > 0) & (advantage > 0)) | ((log_ratio < 0) & (advantage < 0))
    return ~((divergence >= threshold) & further)


def gaussian_kl(p: Gaussian, q: Gaussian) -> Float[Tensor, "n"]:
    """Return KL(p || q) for equal std, averaged over latent elements.

    This is mean((mu_p - mu_q)^2) / (2 std^2).

    Source: Flow-GRPO, arXiv:2505.05470v5, its KL term as printed.
    """
    return sample_error(p.mean - q.mean) / (2 * p.std**2)


def gaussian_kl_no_dt(p: Gaussian, q: Gaussian, dt: Float[Tensor, "*n"]) -> Float[Tensor, "n"]:
    """Return `gaussian_kl` times the step length, as in Flow-GRPO's code, about ten times weaker.

    The published coefficients (0.04, 0.01) are for this form. dt = sigma - sigma_next > 0 is one
    number, or one per sample.
    """
    return gaussian_kl(p, q) * dt


def latent_mse(p: Gaussian, q: Gaussian) -> Float[Tensor, "n"]:
    """Return mean((mu_p - mu_q)^2), the KL for the "unit" density of CPS."""
    return sample_error(p.mean - q.mean)


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


def chunk_log_ratio(
    log_ratio: Float[Tensor, "n"], others: Float[Tensor, "n"], size: Int[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return the log of the geometric mean of a chunk's ratios, (product of ratios)^(1 / size).

    A chunk of consecutive steps is clipped and credited as one step. Source: GCPO,
    arXiv:2510.21583, and code of xingzhejun/GCPO.

    `others` are the sums of the log-ratios of the other transitions of the chunk, without gradient,
    and `size` its number of transitions. The value is equal for all transitions of a chunk, but
    each gradient reaches only the ratio of its own transition. For any f, the sum of the gradients
    of f(chunk_log_ratio) over a chunk is the gradient of f at the product.
    """
    return (log_ratio + others) / size


def chunks_of_sizes(sizes: Sequence[int], num_steps: int) -> Int[Tensor, "T"]:
    """Return the chunk of each step, for chunks of `sizes`; remaining steps are single chunks."""
    if sum(sizes) > num_steps:
        raise ValueError(
            f"algorithm.chunk_sizes {list(sizes)} cover {sum(sizes)} steps; there are {num_steps}"
        )
    filled = torch.tensor([*sizes, *[1] * (num_steps - sum(sizes))])
    return torch.arange(len(filled)).repeat_interleave(filled)


def latent_change(states: Float[Tensor, "B S *latent"]) -> Float[Tensor, "B S-1"]:
    """Return L1rel of each step, |x_{k+1} - x_k|_1 / |x_k|_1."""
    flat = states.float().flatten(2)
    return flat.diff(dim=1).abs().sum(2) / flat[:, :-1].abs().sum(2)


def chunks_of_change(change: Float[Tensor, "T"]) -> Int[Tensor, "T"]:
    """Return the chunk of each step; a chunk ends where the latent change stops rising or falling.

    The paper chooses boundaries from a plot. Ending a chunk at the turning step is our choice.
    """
    slope = change.diff().sign()
    turned = torch.zeros(len(change), dtype=torch.long)
    turned[2:] = slope[1:] * slope[:-1] < 0
    return turned.cumsum(0)


def find_spans(trained: Sequence[int], longest: int) -> list[list[int]]:
    """Return the spans of at most `longest` consecutive steps in an increasing list of steps.

    If a run does not divide evenly, its last span is shorter. The gradient of a span flows through
    all of its steps. Source: CogniEdit, arXiv:2512.13276v1.
    """
    spans: list[list[int]] = []
    for k in trained:
        if spans and spans[-1][-1] == k - 1 and len(spans[-1]) < longest:
            spans[-1].append(k)
        else:
            spans.append([k])
    return spans

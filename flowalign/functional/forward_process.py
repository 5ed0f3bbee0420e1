"""Compute the losses of reinforcement learning on the forward process; one number per row.

A row is a clean sample of the policy, noised again at one level sigma, with its advantage. e is a
velocity residual v - d, d = noise - x0 the target, and l = mean(e^2) its error. Residuals of x0 are
those of the velocity times -sigma, as x0_hat - x0 = -sigma (v - d). `same_group` [n, N] says which
of N rows, those of all processes, belong to the group of each of n rows. The caller reduces.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import per_row

_LEAST_SCALE = 1e-5
"""Lower bound of the scales of residuals by which errors are divided, from DiffusionNFT's code."""


def self_normalised_error(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n"]:
    """Return mean(e^2) / mean|e| with a constant denominator: all rows have similar gradients.

    Source: the adaptive weight of DiffusionNFT, arXiv:2509.16117, and its code.
    """
    scale = residual.detach().abs().flatten(1).mean(1).clamp(min=_LEAST_SCALE)
    return sample_error(residual) / scale


def optimality(advantage: Float[Tensor, "n"], largest: float) -> Float[Tensor, "n"]:
    """Return r = clip(A / (2 largest) + 1/2, 0, 1), the probability that a sample is optimal.

    Source: DiffusionNFT, arXiv:2509.16117, with the scale of its code.
    """
    return (advantage / (2 * largest) + 0.5).clamp(0, 1)


def nft(
    policy: Float[Tensor, "n *latent"],
    old: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "n"],
    optimal: Float[Tensor, "n"],
    beta: float,
) -> Float[Tensor, "n"]:
    """Return (r L(v+) + (1 - r) L(v-)) / beta for r = `optimal`.

    v+ = v_old + beta (v - v_old) and v- = v_old - beta (v - v_old) are an implicit positive and an
    implicit negative policy, and L is the self-normalised error of their x0. Where policy and old
    policy are equal, the gradient is (2 r - 1) times that of L(v), whatever beta.

    Source: DiffusionNFT, arXiv:2509.16117, and its code, without its factor `largest`.
    """
    s, change = per_row(sigma, policy), beta * (policy - old)
    positive = self_normalised_error(s * (old + change))
    negative = self_normalised_error(s * (old - change))
    return (optimal * positive + (1 - optimal) * negative) / beta


Weighting = Literal[
    "uniform", "sigma", "sigma_squared", "huber", "generalised_huber", "self_normalised"
]
"""Function of a row's error that stands for minus its log-likelihood, see `negative_elbo`."""


def negative_elbo(
    residual: Float[Tensor, "n *latent"], sigma: Float[Tensor, "n"], weighting: Weighting
) -> Float[Tensor, "n"]:
    """Return minus the log-likelihood of the clean samples as one noise level estimates it.

    uniform: l, the evidence lower bound with weight 1 of EPG, arXiv:2602.04663. sigma,
    sigma_squared: times a power of sigma. huber: sigma (sqrt(l + 1e-10) - 1e-5).
    generalised_huber: sigma ((l + 1e-10)^p - 1e-10^p) / p with p = 1/4, AWM's own choice. The first
    five are those of AWM, arXiv:2509.25050, and its code. self_normalised: that of x0, which is
    V-GRPO's, arXiv:2604.23380 as others describe it.
    """
    if weighting == "self_normalised":
        return self_normalised_error(per_row(sigma, residual) * residual)
    error, tiny = sample_error(residual), 1e-10
    match weighting:
        case "uniform":
            return error
        case "sigma":
            return sigma * error
        case "sigma_squared":
            return sigma**2 * error
        case "huber":
            return sigma * ((error + tiny) ** 0.5 - tiny**0.5)
        case "generalised_huber":
            return sigma * 4 * ((error + tiny) ** 0.25 - tiny**0.25)


def soft_clip(advantage: Float[Tensor, "n"], largest: float) -> Float[Tensor, "n"]:
    """Return largest * tanh(A / largest).

    Source: V-GRPO, arXiv:2604.23380, its Eq. (17) as others describe it.
    """
    return largest * (advantage / largest).tanh()


def reward_adjusted_matching(
    policy: Float[Tensor, "n *latent"],
    reference: Float[Tensor, "n *latent"],
    advantage: Float[Tensor, "n"],
    eta: float,
) -> Float[Tensor, "n"]:
    """Return mean |v - sg(v_ref + eta A (d - v))|^2: the target is moved by the reward.

    Its gradient is that of mean |v - v_ref|^2 + eta A l.
    Source: RAM, arXiv:2605.10759, as three accounts describe it; its code was not read.
    """
    moved = reference - per_row(eta * advantage, policy) * policy.detach()
    return sample_error(policy - moved)


def advantage_weighted_regression(
    policy: Float[Tensor, "n *latent"],
    old: Float[Tensor, "n *latent"],
    advantage: Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Return mean |v - (v_old + A (d - v_old))|^2: towards the sample from the old policy, or away.

    Its gradient is that of (1 - A) mean |v - v_old|^2 + A l.
    Source: FlowAWR, arXiv:2606.30376, as the documents of a reproduction describe it.
    """
    return sample_error(policy - per_row(1 - advantage, old) * old)


# Groups -------------------------------------------------------------------------------------------


def same_group(rows: Int[Tensor, "n"], everywhere: Int[Tensor, "N"]) -> Bool[Tensor, "n N"]:
    """Return which rows of all processes belong to the group of each row."""
    return rows[:, None] == everywhere[None, :]


def group_mean(values: Float[Tensor, "N"], same_group: Bool[Tensor, "n N"]) -> Float[Tensor, "n"]:
    """Return the mean over the group of each row."""
    return (same_group.to(values) @ values) / same_group.sum(1).clamp(min=1)


def softmax_advantage(
    advantage: Float[Tensor, "n"],
    everyone: Float[Tensor, "N"],
    same_group: Bool[Tensor, "n N"],
    temperature: float,
) -> Float[Tensor, "n"]:
    """Return G softmax(A / temperature) - 1 within groups of G: at least -1, and 0 on average.

    Source: FlowAWR, arXiv:2606.30376, its Eq. (11), with rewards in units of their deviation.
    """
    logits = (everyone / temperature)[None].masked_fill(~same_group, -torch.inf)
    size = same_group.sum(1)
    return size * (advantage / temperature - logits.logsumexp(1)).exp() - 1


def group_preference(
    change: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    same_group: Bool[Tensor, "n N"],
    beta: float,
) -> Float[Tensor, "n"]:
    """Return z = beta mean(A (l - l_ref)) over the group of each row, for `change` l - l_ref.

    DGPO minimises -log sigmoid(-z). Above 0 the policy prefers the worse samples of the group.
    Source: DGPO, arXiv:2510.08425, and its code: a mean over the group, without a factor 1/2.
    """
    return group_mean(beta * advantage * change, same_group)


def dgpo(
    error: Float[Tensor, "n"],
    advantage: Float[Tensor, "n"],
    preference: Float[Tensor, "n"],
    stopped: Bool[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Return sigmoid(z) A l with a constant sigmoid, and without a gradient where `stopped`.

    Over the rows of a group its mean has the gradient of -log sigmoid(-z) / beta.
    Source: the code of DGPO, arXiv:2510.08425.
    """
    matched = torch.where(stopped, error.detach(), error)
    return preference.detach().sigmoid() * advantage * matched


def mask_outside_clip(
    error: Float[Tensor, "n"],
    old: Float[Tensor, "n"],
    advantage: Float[Tensor, "n"],
    clip: float,
) -> Bool[Tensor, "n"]:
    """Return True where exp(l_old - l) has left [1 - clip, 1 + clip] in the advantage's direction.

    Source: the guard in the code of DGPO, arXiv:2510.08425.
    """
    ratio = (old - error).detach().exp()
    return torch.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)


def implicit_reward(
    policy: Float[Tensor, "n *latent"], old: Float[Tensor, "n *latent"]
) -> Float[Tensor, "n"]:
    """Return by how much the policy's self-normalised error is below the old policy's.

    Source: CRD, arXiv:2603.14128, as Flow-Factory implements it.
    """
    return self_normalised_error(old) - self_normalised_error(policy)


def crd(
    implicit: Float[Tensor, "n"],
    optimal: Float[Tensor, "n"],
    beta: float,
    form: Literal["mse", "bce"] = "mse",
) -> Float[Tensor, "n"]:
    """Return the distance of beta times the implicit rewards from the optimalities, over beta.

    Both are centred: what is left after a constant mean over the row's group. mse: the square of
    the difference. bce: the cross-entropy of sigmoid(beta R) with sigmoid(optimality).
    Source: CRD, arXiv:2603.14128, as Flow-Factory implements it, without its factor `largest`.
    """
    if form == "mse":
        return (beta * implicit - optimal).square() / beta
    target = optimal.sigmoid()
    return binary_cross_entropy_with_logits(beta * implicit, target, reduction="none") / beta


def adaptive_weight(
    optimal: Float[Tensor, "n"], largest: float, least: float
) -> Float[Tensor, "n"]:
    """Return least + (largest - least) r: good samples are held nearer to the reference than bad.

    Source: the reward-adaptive KL of CRD, arXiv:2603.14128, as Flow-Factory implements it.
    """
    return least + (largest - least) * optimal


def group_log_softmax(
    score: Float[Tensor, "n"], same_group: Bool[Tensor, "n n"]
) -> Float[Tensor, "n"]:
    """Return the log-probability of each row in the softmax of scores over its group.

    Source: the branch policy of KVPO, arXiv:2605.14278, with scores -error / 2.
    """
    return score - score[None].masked_fill(~same_group, -torch.inf).logsumexp(1)


# Norms --------------------------------------------------------------------------------------------


def norm_ratio(
    policy: Float[Tensor, "n *latent"], reference: Float[Tensor, "n *latent"]
) -> Float[Tensor, "n"]:
    """Return ||v|| / ||v_ref|| of two predictions, over all elements of a row."""
    norms = (v.flatten(1).norm(dim=1) for v in (policy, reference))
    return next(norms) / next(norms).clamp(min=_LEAST_SCALE)


def norm_hinge(ratio: Float[Tensor, "n"], power: int) -> Float[Tensor, "n"]:
    """Return max(0, ratio - 1)^power: 0 unless the policy predicts more than the reference.

    Source: NormGuard, arXiv:2606.27771, of which we know that a hinge acts where ||v|| > ||v_ref||.
    That it is relative, its power and its place per sample are a reconstruction.
    """
    return (ratio - 1).clamp(min=0) ** power

"""Compute the losses of reinforcement learning on the forward process, one number per row.

A row is a clean sample of the policy, noised again to a level sigma, with its advantage. The
velocity residual is e = v - d with target d = noise - x0, and l = mean(e^2) is its error. Residuals
of x0 are x0_hat - x0 = -sigma (v - d). `same_group` [n, N] marks, for each of n rows, the rows of
its group among the N rows of all processes. The caller reduces the result.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import per_row

_LEAST_SCALE = 1e-5
"""Lower bound of the residual scale that divides an error, from DiffusionNFT's code."""


def self_normalised_error(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n"]:
    """Return mean(e^2) / sg(mean|e|), so that all rows have gradients of similar size.

    Source: the adaptive weight of DiffusionNFT, arXiv:2509.16117, and its code.
    """
    return sample_error(residual) / residual_scale(residual)


def residual_scale(residual: Float[Tensor, "n *latent"]) -> Float[Tensor, "n"]:
    """Return mean|e| of each row without gradient, the scale of a self-normalised error."""
    return residual.detach().abs().flatten(1).mean(1).clamp(min=_LEAST_SCALE)


def optimality(advantage: Float[Tensor, "n *place"], largest: float) -> Float[Tensor, "n *place"]:
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

    v+ = v_old + beta (v - v_old) is an implicit positive policy, v- = v_old - beta (v - v_old) an
    implicit negative policy, and L the self-normalised error of x0. If policy and old policy are
    equal, the gradient is (2 r - 1) times the gradient of L(v), for any beta.

    Source: DiffusionNFT, arXiv:2509.16117, and its code, without the factor `largest`.
    """
    s, change = per_row(sigma, policy), beta * (policy - old)
    positive = self_normalised_error(s * (old + change))
    negative = self_normalised_error(s * (old - change))
    return (optimal * positive + (1 - optimal) * negative) / beta


Weighting = Literal["uniform", "sigma", "sigma_squared", "huber", "generalised_huber"]
"""Function of a row's error that estimates its negative log-likelihood, see `negative_elbo`."""


def negative_elbo(
    residual: Float[Tensor, "n *latent"], sigma: Float[Tensor, "n"], weighting: Weighting
) -> Float[Tensor, "n"]:
    """Return the negative log-likelihood of clean samples, estimated at one noise level.

    - uniform: l, the evidence lower bound with weight 1.
    - sigma, sigma_squared: sigma l and sigma^2 l.
    - huber: sigma (sqrt(l + 1e-10) - 1e-5).
    - generalised_huber: sigma ((l + 1e-10)^p - 1e-10^p) / p with p = 1/4, the choice of AWM.

    Source: AWM, arXiv:2509.25050, and its code.
    """
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


# Groups -------------------------------------------------------------------------------------------


def same_group(rows: Int[Tensor, "n"], everywhere: Int[Tensor, "N"]) -> Bool[Tensor, "n N"]:
    """Return True where a row of all processes (column) is in the group of a row."""
    return rows[:, None] == everywhere[None, :]


def group_mean(values: Float[Tensor, "N"], same_group: Bool[Tensor, "n N"]) -> Float[Tensor, "n"]:
    """Return the mean over the group of each row."""
    return (same_group.to(values) @ values) / same_group.sum(1).clamp(min=1)


def group_preference(
    change: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    same_group: Bool[Tensor, "n N"],
    beta: float,
) -> Float[Tensor, "n"]:
    """Return z = beta mean(A (l - l_ref)) over the group of each row; `change` is l - l_ref.

    DGPO minimises -log sigmoid(-z). If z > 0, the policy prefers the worse samples of the group.
    Source: DGPO, arXiv:2510.08425, and its code, with a mean over the group and no factor 1/2.
    """
    return group_mean(beta * advantage * change, same_group)


def dgpo(
    error: Float[Tensor, "n"],
    advantage: Float[Tensor, "n"],
    preference: Float[Tensor, "n"],
    stopped: Bool[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Return sg(sigmoid(z)) A l, without gradient where `stopped`.

    Its mean over the rows of a group has the gradient of -log sigmoid(-z) / beta.
    Source: the code of DGPO, arXiv:2510.08425.
    """
    matched = torch.where(stopped, error.detach(), error)
    return preference.detach().sigmoid() * advantage * matched


def mask_outside_clip(
    error: Float[Tensor, "n"], old: Float[Tensor, "n"], advantage: Float[Tensor, "n"], clip: float
) -> Bool[Tensor, "n"]:
    """Return True where exp(l_old - l) left [1 - clip, 1 + clip] in the advantage's direction.

    Source: the clipping in the code of DGPO, arXiv:2510.08425.
    """
    ratio = (old - error).detach().exp()
    return torch.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)


def implicit_reward(
    policy: Float[Tensor, "n *latent"], old: Float[Tensor, "n *latent"]
) -> Float[Tensor, "n"]:
    """Return the self-normalised error of the old policy minus the error of the policy.

    Source: CRD, arXiv:2603.14128, as implemented in Flow-Factory.
    """
    return self_normalised_error(old) - self_normalised_error(policy)


def crd(
    implicit: Float[Tensor, "n"],
    optimal: Float[Tensor, "n"],
    beta: float,
    form: Literal["mse", "bce"] = "mse",
) -> Float[Tensor, "n"]:
    """Return the distance between beta * implicit and `optimal`, divided by beta.

    Both inputs must be centred: the caller subtracts the mean over each row's group. mse: the
    squared difference. bce: the cross-entropy of sigmoid(beta * implicit) with sigmoid(optimal).
    Source: CRD, arXiv:2603.14128, as implemented in Flow-Factory, without the factor `largest`.
    """
    if form == "mse":
        return (beta * implicit - optimal).square() / beta
    target = optimal.sigmoid()
    return binary_cross_entropy_with_logits(beta * implicit, target, reduction="none") / beta


def centring_weights(
    optimal: Float[Tensor, "N"], same_group: Bool[Tensor, "n N"], temperature: float | None
) -> list[Float[Tensor, "n N"]]:
    """Return the weights of the means that rewards are centred by; the rows sum to 1.

    None: one mean over the group of each row. A number: two means, weighted by softmax(r / T) and
    by softmax(-r / T), which compare a sample with the good and with the bad ones of its group.
    Source: `weight_temp` of CRD, arXiv:2603.14128, as implemented in Flow-Factory.
    """
    scale = 0.0 if temperature is None else 1 / temperature
    signs = (1,) if temperature is None else (1, -1)
    logits = (scale * optimal)[None].expand(same_group.shape)
    return [(sign * logits).masked_fill(~same_group, -torch.inf).softmax(1) for sign in signs]


def adaptive_weight(
    optimal: Float[Tensor, "n"], largest: float, least: float
) -> Float[Tensor, "n"]:
    """Return the KL weight least + (largest - least) r, which is higher for good samples.

    Source: the reward-adaptive KL of CRD, arXiv:2603.14128, as implemented in Flow-Factory.
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

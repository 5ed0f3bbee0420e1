"""Compute preference losses from the errors of winners and losers, one number per pair or row.

n rows of errors are m pairs, winners in rows 0 to m - 1 and losers in rows m to 2m - 1. Errors are
MEANS of squared residuals over latent elements, see `noise_matching.sample_error`. Multiply a beta
that was published for sums by the number of elements. The caller reduces the losses.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from flowalign.functional.transition import per_row

# Pairs with a reference ---------------------------------------------------------------------------


def relative_gap(
    policy: Float[Tensor, "n *F"], reference: Float[Tensor, "n *F"]
) -> Float[Tensor, "m *F"]:
    """Return (l_w - r_w) - (l_l - r_l), for errors l of the policy and r of the reference.

    If it is negative, the policy prefers the winner.
    """
    winner, loser = (policy - reference).chunk(2)
    return winner - loser


def implicit_margin(gap: Float[Tensor, "m"], beta: float) -> Float[Tensor, "m"]:
    """Return -beta / 2 * gap, the difference between the implicit rewards of winner and loser.

    Source: Diffusion-DPO, arXiv:2311.12908, and its code. Beta includes the number of timesteps and
    their weight; the error is a mean with the factor 1/2. Published values on this scale are 5000
    (SD1.5, SDXL), and 2000 and 100 (flow matching). Code without the factor 1/2 states half of it.
    """
    return -beta / 2 * gap


def beyond_scores(
    z: Float[Tensor, "m"], score_margin: Float[Tensor, "m"], own_weight: float
) -> Float[Tensor, "m"]:
    """Return (z - score_margin) / own_weight, the margin that other dimensions do not explain.

    score_margin is the sum of w_k (score_w,k - score_l,k) over the other dimensions k.
    Source: MODPO, arXiv:2310.03708, where z is beta times the difference of log-ratios.
    """
    return (z - score_margin) / own_weight


def sigmoid_link(z: Float[Tensor, "m"], smoothing: float = 0.0) -> Float[Tensor, "m"]:
    """Return -(1 - smoothing) log sigmoid(z) - smoothing log sigmoid(-z), which is log 2 at z = 0.

    `smoothing` is the probability that the label is wrong (conservative DPO). The optimal z is
    finite, the logit of 1 - smoothing.
    """
    return -(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def hinge_link(z: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
    """Return max(0, 1 - z), which has no gradient for margins above 1."""
    return torch.relu(1 - z)


def ipo_link(z: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
    """Return (z - 1/2)^2, a regression of the margin to 1/2.

    With the unscaled margin h and z = beta h, this is beta^2 (h - 1/(2 beta))^2, the loss of IPO
    times beta^2. The slope at z = 0 is -1 on this scale, as for the hinge; for DPO it is -1/2.
    Source: IPO, arXiv:2310.12036.
    """
    return (z - 0.5).square()


def auto_beta(typical_gap: float, target: float) -> float:
    """Return beta = 2 log((1 - target) / target) / typical_gap; infinite if the gap is 0.

    `typical_gap` is the mean of |relative_gap|. At this beta, a correctly ordered pair with the
    typical gap has sigmoid(-z) = target, the factor on its DPO gradient.
    Source: SimpleTuner's automatic beta, with target 0.2.
    """
    logit = math.log((1 - target) / target)
    return 2 * logit / typical_gap if typical_gap > 0 else math.inf


def segment_margin(
    gap: Float[Tensor, "m F"], segments: Float[Tensor, "m F"], beta: float
) -> Float[Tensor, "m"]:
    """Return -beta / 2 * mean of label * gap over frames with a preference; 0 if there are none.

    A label is 1 if the first row of a pair is better, -1 if the second is better, 0 for a tie.
    Source: DenseDPO, arXiv:2506.03517; appendix A.3 averages over frames except ties. The factor
    1/2 is our addition, so that one beta fits pairs with and without segments.
    """
    decided = segments.abs().sum(1).clamp(min=1)
    return implicit_margin((segments * gap).sum(1) / decided, beta)


def linear_dpo(
    policy: Float[Tensor, "n"], reference: Float[Tensor, "n"], beta: float, floor: float
) -> Float[Tensor, "m"]:
    """Return `linear_weight` * (l_w - l_l); the weight has no gradient."""
    winner, loser = policy.chunk(2)
    weight = linear_weight(relative_gap(policy, reference), beta, floor)
    return weight.detach() * (winner - loser)


def linear_weight(gap: Float[Tensor, "m"], beta: float, floor: float) -> Float[Tensor, "m"]:
    """Return clip(0.2 beta gap + 1/2, floor, 1 - floor); DPO has sigmoid(beta gap / 2) instead.

    Source: Linear-DPO, arXiv:2605.21123, and its code. The tangent of the sigmoid at gap 0 would be
    0.125 beta gap + 1/2.
    """
    return (0.2 * beta * gap + 0.5).clamp(floor, 1 - floor)


def scale_row_gradients(
    x: Float[Tensor, "n *latent"], scale: Float[Tensor, "n"]
) -> Float[Tensor, "n *latent"]:
    """Return exactly x, with the gradient of each row multiplied by `scale`."""
    value = x.detach()
    # The difference is exactly 0, so the value equals x bit for bit.
    return value + per_row(scale, x) * (x - value)


@torch.no_grad()
def balancing_scale(
    winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"]
) -> Float[Tensor, "m"]:
    """Return min(1, |winner| / |loser|) of the norms of residuals; 1 if the loser's norm is 0.

    A loss on the difference of squared residuals pulls the prediction along the winner's residual
    and pushes it along the loser's. With this scale the push is never larger than the pull.
    Source: CPO, arXiv:2601.04300, which balances the two gradients; the rule is a reconstruction.
    """
    pull, push = (side.flatten(1).norm(dim=1) for side in (winner, loser))
    return (pull / push.where(push > 0, 1.0)).where(push > pull, 1.0)


def loser_scale(
    winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"], mu: float
) -> Float[Tensor, "m"]:
    """Return a factor on the loser's gradient that prevents a step from raising the winner's error.

    The residuals g_A of the winner and g_B of the loser are proportional to the gradients of their
    errors. The scale is clip((1 - mu) |g_A|^2 / <g_A, g_B>, 0, 1), and 1 if the product is not
    positive. Then <-g_A + scale g_B, g_A> <= -mu |g_A|^2. The scale has no gradient.
    Source: Diffusion-SDPO, arXiv:2511.03317; its code treats a batch as one pair.
    """
    a, b = winner.detach().flatten(1), loser.detach().flatten(1)
    agreement, limit = (a * b).sum(1), (1 - mu) * a.square().sum(1)
    return torch.where(agreement > limit, limit / agreement, 1.0)


# Pairs without a reference ------------------------------------------------------------------------


def mapo(policy: Float[Tensor, "n"], beta: float, scale: float, s: float) -> Float[Tensor, "m"]:
    """Return l_w - beta log sigmoid(scale (f(l_w) - f(l_l))), with f = `mapo_likelihood`.

    Source: MaPO, arXiv:2406.06424, and its code, where scale is the number of timesteps, 1000.
    """
    return policy.chunk(2)[0] - beta * logsigmoid(mapo_margin(policy, scale, s))


def mapo_margin(policy: Float[Tensor, "n"], scale: float, s: float) -> Float[Tensor, "m"]:
    """Return the margin scale (f(l_w) - f(l_l)), with f = `mapo_likelihood`.

    f falls by s/2 per unit of error, so the margin is about scale s/2 (l_l - l_w).
    """
    winner, loser = mapo_likelihood(policy, s).chunk(2)
    return scale * (winner - loser)


def mapo_likelihood(error: Float[Tensor, "n"], s: float) -> Float[Tensor, "n"]:
    """Return s l / (exp(s l) - 1), which falls from 1 at error l = 0 to 0."""
    # x / (e^x - 1) without overflow: both parts are multiplied by e^-x. It is 0 / 0 at x = 0.
    x = (s * error).clamp(min=1e-12)
    return x * (-x).exp() / -torch.expm1(-x)


# Rows ---------------------------------------------------------------------------------------------

Utility = Literal["sigmoid", "loss_averse", "risk_seeking"]
"""Utility of a gain. sigmoid: saturates for gains and losses. loss_averse (log sigmoid): saturates
for gains only. risk_seeking (softplus): saturates for losses only."""

_UTILITIES = {"sigmoid": torch.sigmoid, "loss_averse": logsigmoid, "risk_seeking": softplus}


def kto(
    gain: Float[Tensor, "n"],
    desirable: Bool[Tensor, "n"],
    baseline: Float[Tensor, ""],
    beta: float,
    utility: Utility,
) -> Float[Tensor, "n"]:
    """Return 1 - U(beta (gain - baseline)) for desirable rows, else 1 - U(-beta (gain - baseline)).

    gain = r - l is the reference's error minus the policy's, without the factor 1/2 of pairs.
    Source: Diffusion-KTO, arXiv:2404.04465, and its code (the third of its risk-seeking forms).
    """
    sign = 2 * desirable.to(gain) - 1
    return 1 - _UTILITIES[utility](sign * beta * (gain - baseline))


def kto_baseline(gain: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    """Return max(0, mean gain), an estimate of the divergence from the reference, detached."""
    return gain.detach().mean().clamp(min=0)


def exponential_weight(
    reward: Float[Tensor, "n"], temperature: float, cap: float
) -> Float[Tensor, "n"]:
    """Return min(exp(reward / temperature), cap)."""
    return (reward / temperature).exp().clamp(max=cap)


def weighted_score(
    scores: Mapping[str, Float[Tensor, "n"]], weights: Mapping[str, float]
) -> Float[Tensor, "n"]:
    """Return the sum of weight * score over the weighted dimensions; NaN if a score is unknown."""
    missing = sorted(set(weights) - set(scores))
    if missing:
        raise ValueError(f"no scores {missing}; the data has {sorted(scores)}")
    return torch.stack([weight * scores[name] for name, weight in weights.items()]).sum(0)


def step_dpo(
    log_ratio_winner: Float[Tensor, "n"], log_ratio_loser: Float[Tensor, "n"], beta: float
) -> Float[Tensor, "n"]:
    """Return -log sigmoid(beta * (log_ratio_winner - log_ratio_loser)).

    log_ratio is log pi - log pi_ref.

    Source: SPO, arXiv:2406.04314, and its code, which uses beta 10 and also averages
    log-probabilities over latent elements.
    """
    return -torch.nn.functional.logsigmoid(beta * (log_ratio_winner - log_ratio_loser))


def best_and_worst(
    value: Float[Tensor, "n"], group: Int[Tensor, "n"]
) -> tuple[Int[Tensor, "m"], Int[Tensor, "m"]]:
    """Return the indices of the highest and of the lowest value of each group.

    Groups with equal values are skipped.
    """
    # Two stable sorts: by group, and within a group by value.
    order = value.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    last = group.unique(return_counts=True)[1].cumsum(0)
    first = torch.cat([last.new_zeros(1), last[:-1]]) if len(last) else last
    best, worst = order[last - 1], order[first]
    differ = value[best] > value[worst]
    return best[differ], worst[differ]

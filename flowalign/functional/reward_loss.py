"""Compute losses that train a reward model on comparisons, rankings, votes and ratings.

Each function returns one loss per comparison, list or rating. Scores have any leading shape, such
as [pairs, dimensions]. `target` is the probability that A is better: 1 or 0 for a decision, 0.5 for
a tie, or a share of votes. For a missing label pass any finite number, and mask the loss.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import huber_loss, log_softmax, logsigmoid

Scores = Float[Tensor, "*n"]
"""Scores, or other numbers of the same comparisons."""

# Pairs --------------------------------------------------------------------------------------------


def bradley_terry(a: Scores, b: Scores, target: Scores) -> Scores:
    """Return the cross-entropy of `target` under P(A) = sigmoid(a - b); at least log 2 for ties."""
    return _cross_entropy(logsigmoid(a - b), logsigmoid(b - a), target)


def margin(a: Scores, b: Scores, target: Scores, by: float | Scores = 0.57) -> Scores:
    """Return the Bradley-Terry loss with a required margin: -log sigmoid(lead - by).

    Source: VideoAlign's code. Its "constant_margin" is 0.57; its "margin" is the difference of the
    annotators' ratings, better minus worse.
    """
    return _cross_entropy(logsigmoid(a - b - by), logsigmoid(b - a - by), target)


def bt_with_ties(a: Scores, b: Scores, target: Scores, log_k: Float[Tensor, "..."]) -> Scores:
    """Return the negative log-likelihood of the labels under Bradley-Terry with ties.

    A target must be 1 for A, 0.5 for a tie or 0 for B. log_k > 0 broadcasts to the scores: one
    number, one per dimension, or one per pair.
    """
    if not ((target == 0) | (target == 0.5) | (target == 1)).all():
        raise ValueError(
            "bt_with_ties needs targets of 0, 0.5 (a tie) or 1; "
            "for shares of votes take bradley_terry or vote_fraction"
        )
    better, tie, worse = _log_outcomes(a, b, log_k)
    return -torch.where(target == 0.5, tie, torch.where(target == 1, better, worse))


def log_k_of(tie_share: float) -> float:
    """Return the log k at which equal scores tie with probability `tie_share`, as initial value."""
    if not 0 < tie_share < 1:
        raise ValueError(f"tie_share must be inside (0, 1), got {tie_share}")
    return math.log((1 + tie_share) / (1 - tie_share))


def thurstone(
    a: Scores, b: Scores, target: Scores, log_sigma_a: Scores, log_sigma_b: Scores
) -> Scores:
    """Return the cross-entropy under P(A) = Phi((a - b) / sqrt(sigma_a^2 + sigma_b^2)) (probit)."""
    z = (a - b) / _joint_std(log_sigma_a, log_sigma_b)
    log_ndtr = torch.special.log_ndtr
    return _cross_entropy(log_ndtr(z), log_ndtr(-z), target)


def uncertainty(
    a: Scores, b: Scores, target: Scores, log_sigma_a: Scores, log_sigma_b: Scores
) -> Scores:
    """Return the expected Bradley-Terry loss, -E log sigmoid(z), of two uncertain scores.

    z is normal with mean a - b and variance sigma_a^2 + sigma_b^2. HPSv3's code draws 1,000 samples
    in half precision. Our integral uses 32 Gauss-Hermite nodes and has no sampling noise.
    """
    nodes, weights = _gauss_hermite(32)
    x, w = a.new_tensor(nodes), a.new_tensor(weights)
    z = (a - b)[..., None] + _joint_std(log_sigma_a, log_sigma_b)[..., None] * x
    return (_cross_entropy(logsigmoid(z), logsigmoid(-z), target[..., None]) * w).sum(-1)


# Lists --------------------------------------------------------------------------------------------


def vote_fraction(
    score: Float[Tensor, "*n m"], share: Float[Tensor, "*n m"], mask: Bool[Tensor, "*n m"]
) -> Scores:
    """Return the KL from vote shares to softmax(score), which is 0 if both agree, also for ties.

    `mask` marks the candidates of each list, because lists differ in length. Shares sum to 1 over
    the marked candidates.
    Source: PickScore, arXiv:2305.01569, with pairs as lists and shares 0, 0.5 and 1.
    """
    logp = log_softmax(_mask_scores(score, mask), -1)
    share = torch.where(mask, share, 0.0)
    return (torch.special.xlogy(share, share) - share * logp).sum(-1)


def plackett_luce(
    score: Float[Tensor, "*n m"], rank: Float[Tensor, "*n m"], mask: Bool[Tensor, "*n m"]
) -> Scores:
    """Return the negative log-likelihood of a ranking, with rank 1 as the best.

    Each candidate is chosen over the candidates ranked strictly below it, and the log-likelihoods
    of the choices are added. Without ties this is exactly Plackett-Luce, and Bradley-Terry for a
    pair. Candidates of equal rank are not compared, so a tie has no effect on their order.
    `has_order` marks the lists with a training signal.
    """
    below = rank[..., None, :] > rank[..., :, None]
    itself = torch.eye(score.shape[-1], dtype=torch.bool, device=score.device)
    rivals = _mask_scores(score[..., None, :], (below & mask[..., None, :]) | itself)
    return torch.where(mask, rivals.logsumexp(-1) - score, 0.0).sum(-1)


def has_order(rank: Float[Tensor, "*n m"], mask: Bool[Tensor, "*n m"]) -> Bool[Tensor, "*n"]:
    """Return True for lists in which at least one candidate is ranked above another."""
    best = rank.masked_fill(~mask, math.inf).amin(-1)
    worst = rank.masked_fill(~mask, -math.inf).amax(-1)
    return best < worst


# Ratings ------------------------------------------------------------------------------------------


def squared_error(score: Scores, rating: Scores) -> Scores:
    """Return (score - rating)^2. VideoAlign's code subtracts 3 from ratings of 1 to 5 first."""
    return (score - rating) ** 2


def huber(score: Scores, rating: Scores, delta: float = 1.0) -> Scores:
    """Return error^2 / 2 if |error| <= delta, else delta * (|error| - delta / 2)."""
    return huber_loss(score, rating, reduction="none", delta=delta)


def ordinal(score: Scores, level: Int[Tensor, "*n"], cuts: Float[Tensor, "*d cuts"]) -> Scores:
    """Return the negative log-likelihood of a level 0 ... L-1 under the proportional odds model.

    P(level <= l) = sigmoid(cuts[l] - score). The L - 1 cuts must increase. They may differ by
    dimension, if the dimensions are the last axes of the scores.
    Source: the proportional odds model, McCullagh, 1980.
    """
    if not (cuts.diff(dim=-1) > 0).all():
        raise ValueError(f"cuts must increase, got {cuts.tolist()}")
    last = cuts.shape[-1]
    if not ((level >= 0) & (level <= last)).all():
        raise ValueError(f"levels must be 0 to {last}, got {level.min()} to {level.max()}")
    upper = _select_cut(cuts, level.clamp(max=last - 1)) - score
    lower = _select_cut(cuts, (level - 1).clamp(min=0)) - score
    # sigmoid(u) - sigmoid(l) = sigmoid(u) sigmoid(-l) (1 - exp(l - u)); the end levels have only
    # one cut. The -1.0 there is a placeholder: log(-expm1(0)) would give NaN gradients, even where
    # torch.where does not select it.
    between = torch.where((level > 0) & (level < last), lower - upper, -1.0)
    inside = torch.log(-torch.expm1(between))
    logp = torch.where(level == last, 0.0, logsigmoid(upper))
    logp = logp + torch.where(level == 0, 0.0, logsigmoid(-lower))
    return -(logp + torch.where((level > 0) & (level < last), inside, 0.0))


def _cross_entropy(log_a: Tensor, log_b: Tensor, target: Tensor) -> Tensor:
    return -(target * log_a + (1 - target) * log_b)


def _log_outcomes(a: Tensor, b: Tensor, log_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log P(A), log P(tie) and log P(B), which sum to 1 as probabilities.

    P(A) = sigmoid(a - b - log k), and P(tie) = (k^2 - 1) P(A) P(B). At a = b the tie has
    probability (k - 1) / (k + 1), which is 2/3 for the k = 5 of VideoAlign's code.
    Source: Rao and Kupper, 1967.
    """
    if not (log_k > 0).all():
        raise ValueError(f"log_k must be above 0, or ties are impossible, got {log_k.tolist()}")
    # log(k^2 - 1) = 2 log k + log(1 - k^-2), which expm1 keeps precise near k = 1.
    better, worse = logsigmoid(a - b - log_k), logsigmoid(b - a - log_k)
    return better, 2 * log_k + torch.log(-torch.expm1(-2 * log_k)) + better + worse, worse


def _joint_std(log_sigma_a: Tensor, log_sigma_b: Tensor) -> Tensor:
    return (torch.logaddexp(2 * log_sigma_a, 2 * log_sigma_b) / 2).exp()


def _mask_scores(score: Tensor, mask: Tensor) -> Tensor:
    """Set scores outside the mask to the lowest finite number, so that gradients stay finite."""
    return torch.where(mask, score, torch.finfo(score.dtype).min)


def _select_cut(cuts: Tensor, index: Tensor) -> Tensor:
    return cuts.expand(*index.shape, -1).gather(-1, index[..., None])[..., 0]


@lru_cache
def _gauss_hermite(num: int) -> tuple[list[float], list[float]]:
    """Return x and w with sum(w f(x)) = E f(x) under a standard normal (Golub and Welsch)."""
    off = torch.arange(1, num, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes.tolist(), (vectors[0] ** 2).tolist()

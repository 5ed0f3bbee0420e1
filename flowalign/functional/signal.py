"""Estimate signal and noise of policy gradients from the gradients of independent batches.

At fixed network weights, denoising step k of a batch has a gradient g_k with mean m_k, the signal,
plus noise. Inner products of gradients from different batches have the expectation m_k . m_j. Inner
products within a batch exceed it by the noise. Signal and noise are therefore estimated without
bias, without an update and without knowledge of m_k. With weights w on the steps, the squared
signal-to-noise ratio of a batch is

    |sum_k w_k m_k|^2 / E |sum_k w_k (g_k - m_k)|^2

Its inverse is the number of batches at which signal and noise of the mean gradient are equal.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

_COLUMNS = 2**16
"""Number of gradient entries that are multiplied at once in float64."""


class Products(NamedTuple):
    """Inner products between blocks of batches; a block may be a single batch.

    Sums over blocks are sufficient for signal and noise: products of different blocks estimate the
    signal, and the product of a block with itself exceeds it by the noise.
    """

    sums: Float[Tensor, "J K J K"]
    """Inner products of the gradients of steps, each summed over the batches of a block."""
    batches: Int[Tensor, "J"]
    """Number of batches in each block."""


class Moments(NamedTuple):
    """Inner products of the step gradients, separately for their means and their noise."""

    signal: Float[Tensor, "K K"]
    """Inner products m_k . m_j; the estimate may have negative eigenvalues."""
    noise: Float[Tensor, "K K"]
    """Noise E (g_k - m_k) . (g_j - m_j) of one batch."""


def inner_products(
    sums: Sequence[Sequence[Float[Tensor, "p"]]],
    count: Sequence[int],
    scale: Float[Tensor, "p"] | None = None,
) -> Products:
    """Return the inner products of J x K gradients, with entries multiplied by `scale` if given."""
    rows = [row for block in sums for row in block]
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, len(rows[0]), _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        # Convert in parts: float64 gradients of a large network would not fit into memory.
        part = torch.stack([row[columns] for row in rows]).double()
        part = part if scale is None else part * scale[columns]
        total += part @ part.T
    shape = len(sums), len(sums[0])
    return Products(total.view(*shape, *shape), torch.tensor(count))


def moments(products: Products, kept: Bool[Tensor, "J"] | None = None) -> Moments:
    """Estimate signal and noise without bias from the blocks `kept`, or from all blocks.

    At least two blocks are needed; two halves of a batch are enough. For blocks with sums S and
    counts n, signal = (sum over pairs a, b of S_a . S_b) / (sum of n_a n_b), and
    noise = (sum of S_a . S_a - n_a^2 signal) / (sum of n_a).

    Raises:
        ValueError: There are fewer than two blocks.
    """
    every = torch.ones(len(products.batches), dtype=torch.bool)
    chosen = every if kept is None else kept
    sums, count = products.sums[chosen][:, :, chosen], products.batches[chosen].double()
    if len(count) < 2:
        raise ValueError(
            f"there are {len(count)} blocks of gradients; signal and noise need at least 2"
        )
    within = sums.diagonal(dim1=0, dim2=2).sum(2)
    signal = (sums.sum((0, 2)) - within) / (count.sum() ** 2 - count.square().sum())
    signal = (signal + signal.T) / 2
    return Moments(signal, (within - count.square().sum() * signal) / count.sum())


def moments_of_halves(halves: Float[Tensor, "2 K p"], shares: tuple[float, float]) -> Moments:
    """Estimate signal and noise of one batch without bias from its two independent halves.

    The sum of both gradients is the gradient of the batch. Each half has the expectation
    share * m_k, where `shares` are the shares of the samples. The result is on the CPU, because it
    is small and GPUs compute float64 slowly.
    """
    first, second = halves
    whole = first + second
    between = (first @ second.T).cpu().double() / (shares[0] * shares[1])
    signal = (between + between.T) / 2
    return Moments(signal, (whole @ whole.T).cpu().double() - signal)


def project(vector: Float[Tensor, "p"], signs: Bool[Tensor, "p"], size: int) -> Float[Tensor, "q"]:
    """Return a random projection: entries, negated where `signs` is False, added into `size` sums.

    With random signs, inner products keep their expectation but become noisier.
    """
    signed = torch.where(signs, vector, -vector)
    return pad(signed, (0, -len(vector) % size)).view(-1, size).sum(0)


def random_signs(size: int, device: torch.device, seed: int = 0) -> Bool[Tensor, "p"]:
    """Return signs for `project`, the same in every process."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(2, (size,), generator=chance, dtype=torch.bool).to(device)


def signal_to_noise(found: Moments, weights: Float[Tensor, "K"]) -> Float[Tensor, ""]:
    """Return the squared signal-to-noise ratio of a batch with `weights` on its steps.

    Without noise it is 0, because then there is no gradient, or all weights are 0.
    """
    noise = weights @ found.noise @ weights
    return torch.where(noise > 0, (weights @ found.signal @ weights) / noise, 0.0)


def best_weights(found: Moments) -> Float[Tensor, "K"]:
    """Return the non-negative weights, largest 1, with the best estimate of the mean gradient.

    They maximise (sum_k w_k m_k . sum_j m_j)^2 / noise, and solve noise w = signal 1. Steps with a
    negative solution are removed one by one, the most negative first.
    """
    kept = torch.ones(len(found.noise), dtype=torch.bool)
    weights = torch.zeros(len(found.noise), dtype=found.noise.dtype)
    while kept.any():
        towards = found.signal[kept].sum(1)
        solved = torch.linalg.lstsq(found.noise[kept][:, kept], towards[:, None]).solution[:, 0]
        if (solved > 0).all():
            weights[kept] = solved / solved.max()
            return weights
        kept[kept.nonzero()[solved.argmin(), 0]] = False
    return weights


def subtract_estimation_error(found: Moments) -> Moments:
    """Return moments with the estimation error subtracted from the signal.

    In units of the noise of each step, the true signal has eigenvalues >= 0. The lowest estimated
    eigenvalue, if negative, measures the estimation error. It is subtracted from all eigenvalues,
    which are then clamped at 0.
    """
    unit = found.noise.diagonal().clamp(min=torch.finfo(found.noise.dtype).tiny).sqrt()
    values, vectors = torch.linalg.eigh(found.signal / (unit[:, None] * unit))
    # `eigh` sorts its values, so the first is the lowest.
    kept = (values + values[:1].clamp(max=0)).clamp(min=0)
    signal = (vectors * kept) @ vectors.T * (unit[:, None] * unit)
    return Moments(signal, found.noise)


def cross_fit(
    products: Products, kept: Bool[Tensor, "J"] | None = None, chosen_by: Products | None = None
) -> Float[Tensor, ""]:
    """Return the signal-to-noise ratio of the best weights, cross-fitted on two halves of blocks.

    Each half evaluates the weights that the other half chose, because evaluating weights on the
    same batches is optimistic. `chosen_by` are products of the same batches under other conditions,
    such as earlier network weights; if given, they choose the weights. The half of a block does not
    depend on `kept`.

    Raises:
        ValueError: A half has fewer than two blocks.
    """
    kept = torch.ones(len(products.batches), dtype=torch.bool) if kept is None else kept
    even = torch.arange(len(kept)) % 2 == 0
    halves, judged = (kept & even, kept & ~even), []
    for half, other in (halves, halves[::-1]):
        weights = best_weights(moments(chosen_by or products, half))
        judged.append(signal_to_noise(moments(products, other), weights))
    return torch.stack(judged).mean()


def leave_one_out(
    statistic: Callable[[Bool[Tensor, "J"]], Tensor], blocks: int
) -> Float[Tensor, "J *rest"]:
    """Return a statistic with each block left out in turn."""
    return torch.stack([statistic(torch.arange(blocks) != out) for out in range(blocks)])


def standard_error(left: Float[Tensor, "J *rest"]) -> Float[Tensor, "*rest"]:
    """Return the jackknife standard error of a statistic from its `leave_one_out` values.

    It is exact for means of equally large blocks. For the difference between two settings that were
    probed on the same batches, pass the differences of their values.
    """
    return ((left - left.mean(0)).square().sum(0) * (len(left) - 1) / len(left)).sqrt()


def sibling_gain(
    own: Float[Tensor, "K"],
    total: float,
    noise: float,
    *,
    children: int,
    ahead: Float[Tensor, "K"],
    num_steps: int,
    training: float = 3.0,
) -> Float[Tensor, "K"]:
    """Return the variance of outcome credit divided by that of sibling credit, at equal cost.

    For the variance w^2 of outcomes that a step causes (`own`), the variance S of outcomes of a
    prompt (`total`) and that of the scorer's error (`noise`), the gradient of a transition has the
    variance S + s^2 + w^2 with outcomes. With `children` siblings that share all later noise it is
    (2 w^2 + s^2) K / (K - 1). Siblings pay where the result exceeds 1; see `transition_costs`.
    """
    with_outcomes, with_siblings = transition_costs(ahead, num_steps, children, training)
    variance = (2 * own + noise) * children / (children - 1)
    return (total + noise + own) * with_outcomes / (variance * with_siblings)


def transition_costs(
    ahead: Float[Tensor, "K"], num_steps: int, children: int, training: float = 3.0
) -> tuple[float, Float[Tensor, "K"]]:
    """Return the forward passes per transition with outcome credit, and with siblings by step.

    They are T / K' + c with outcomes of K' trained steps, and `ahead` + c / K + 1 with K siblings
    that are completed in `ahead` steps each. The cost c of training a transition is `training`.
    """
    return num_steps / len(ahead) + training, ahead + training / children + 1

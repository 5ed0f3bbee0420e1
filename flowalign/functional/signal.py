"""Estimate the signal and the noise of policy gradients from those of independent batches.

At fixed weights, denoising step k of a batch has a gradient with a mean m_k, the signal, and a
noise around it. Inner products between the gradients of different batches have the expectation
m_k . m_j, those within a batch exceed it by the noise: both are estimated without bias, without an
update and without knowing m_k. With weights w on the steps, a batch is worth

    |sum_k w_k m_k|^2 / E |sum_k w_k (g_k - m_k)|^2

its squared signal to noise: how many batches it takes until the mean gradient shows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

_COLUMNS = 2**16
"""Entries of a gradient that are multiplied at once, in float64."""


class Products(NamedTuple):
    """Holds inner products between blocks of batches, of which some may be a single batch.

    Sums over blocks are all that signal and noise need: pairs of different blocks show the signal,
    and a block's own product exceeds it by its noise.
    """

    sums: Float[Tensor, "J K J K"]
    """Inner products of the gradients of steps, each summed over the batches of a block."""
    batches: Int[Tensor, "J"]
    """Number of batches of each block."""


class Moments(NamedTuple):
    """Holds the inner products of gradients of steps: of their means, and of their noise."""

    signal: Float[Tensor, "K K"]
    """m_k . m_j; its estimate may have negative eigenvalues."""
    noise: Float[Tensor, "K K"]
    """E (g_k - m_k) . (g_j - m_j), of one batch."""


def inner_products(
    sums: Sequence[Sequence[Float[Tensor, "p"]]],
    count: Sequence[int],
    scale: Float[Tensor, "p"] | None = None,
) -> Products:
    """Return the inner products of J x K gradients, each entry times `scale`, if that is given."""
    rows = [row for block in sums for row in block]
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, len(rows[0]), _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        # A part at a time: gradients of a large network in float64 would not fit into memory.
        part = torch.stack([row[columns] for row in rows]).double()
        part = part if scale is None else part * scale[columns]
        total += part @ part.T
    shape = len(sums), len(sums[0])
    return Products(total.view(*shape, *shape), torch.tensor(count))


def moments(products: Products, kept: Bool[Tensor, "J"] | None = None) -> Moments:
    """Estimate signal and noise without bias from at least two blocks, all of them or those kept.

    Two halves of a batch are enough. With sums S and counts n of blocks, signal = sum over pairs a,
    b of S_a . S_b / sum of n_a n_b, and noise = sum of (S_a . S_a - n_a^2 signal) / sum of n_a.

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

    Their gradients add up to the batch's; each has the expectation share * m_k, where the share is
    that of its samples. The result is on the CPU: it is small, and GPUs compute float64 slowly.
    """
    first, second = halves
    whole = first + second
    between = (first @ second.T).cpu().double() / (shares[0] * shares[1])
    signal = (between + between.T) / 2
    return Moments(signal, (whole @ whole.T).cpu().double() - signal)


def project(vector: Float[Tensor, "p"], signs: Bool[Tensor, "p"], size: int) -> Float[Tensor, "q"]:
    """Add each entry, negated where its sign is False, to one of `size` sums.

    With random signs, inner products keep their expectation and gain noise.
    """
    signed = torch.where(signs, vector, -vector)
    return pad(signed, (0, -len(vector) % size)).view(-1, size).sum(0)


def random_signs(size: int, device: torch.device, seed: int = 0) -> Bool[Tensor, "p"]:
    """Return signs for `project`, the same in every process."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(2, (size,), generator=chance, dtype=torch.bool).to(device)


def signal_to_noise(found: Moments, weights: Float[Tensor, "K"]) -> Float[Tensor, ""]:
    """Return the squared signal to noise of a batch whose steps have these weights.

    It is 0 where there is no noise, because nothing was learnt from: no weights, no gradient.
    """
    noise = weights @ found.noise @ weights
    return torch.where(noise > 0, (weights @ found.signal @ weights) / noise, 0.0)


def best_weights(found: Moments) -> Float[Tensor, "K"]:
    """Return the weights, none negative and the largest 1, that show the whole mean gradient best.

    They maximise (sum_k w_k m_k . sum_j m_j)^2 / noise, and solve noise w = signal 1; steps whose
    solution is negative are left out, the most negative first.
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
    """Return the same noise, and of the signal what stands out from the error of its estimate.

    In units of each step's noise the estimate has eigenvalues, which truly are 0 or above: the
    lowest says how far they are off, and all are lowered by as much, down to 0.
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
    """Return the signal to noise of the best weights, found on one half of the blocks each.

    Weights that are judged by the batches which chose them look better than they are. `chosen_by`
    are products of the same batches elsewhere, such as at earlier weights of the network, whose
    best weights are judged here. Blocks keep their half when others are left out.

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
    """Return a statistic of blocks, without each of them in turn."""
    return torch.stack([statistic(torch.arange(blocks) != out) for out in range(blocks)])


def standard_error(left: Float[Tensor, "J *rest"]) -> Float[Tensor, "*rest"]:
    """Return the jackknife's standard error of a statistic, given `leave_one_out` values.

    It is exact for means of blocks of one size. The error of a difference between two settings that
    were probed on the same batches is that of the difference of their values.
    """
    return ((left - left.mean(0)).square().sum(0) * (len(left) - 1) / len(left)).sqrt()

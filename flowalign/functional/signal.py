"""Estimate the signal and the noise of policy gradients from those of independent batches.

At fixed weights, denoising step k of a batch has a gradient with a mean m_k, the signal, and a
noise around it. Inner products between the gradients of different batches have the expectation
m_k . m_j, those within a batch exceed it by the noise: both are estimated without bias, without an
update and without knowing m_k. With weights w on the steps, a batch is worth

    |sum_k w_k m_k|^2 / E |sum_k w_k (g_k - m_k)|^2

its squared signal to noise: how many batches it takes until the mean gradient shows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad


class Moments(NamedTuple):
    """Holds the inner products of gradients of steps: of their means, and of their noise."""

    signal: Float[Tensor, "K K"]
    """m_k . m_j; its estimate may have negative eigenvalues."""
    noise: Float[Tensor, "K K"]
    """E (g_k - m_k) . (g_j - m_j)."""


def moments(products: Float[Tensor, "B K B K"]) -> Moments:
    """Estimate signal and noise without bias from all inner products of B >= 2 batches.

    Raises:
        ValueError: There are fewer than two batches.
    """
    count = len(products)
    if count < 2:
        raise ValueError(
            f"there are gradients of {count} batches; signal and noise need at least 2"
        )
    within = products.diagonal(dim1=0, dim2=2).sum(2)
    between = products.sum((0, 2)) - within
    signal = between / (count * (count - 1))
    signal = (signal + signal.T) / 2
    return Moments(signal, within / count - signal)


def moments_of_halves(halves: Float[Tensor, "2 K p"], shares: tuple[float, float]) -> Moments:
    """Estimate signal and noise of one batch without bias from its two independent halves.

    Their gradients add up to the batch's; each has the expectation share * m_k, where the share is
    that of its samples.
    """
    first, second = halves
    whole = first + second
    between = (first @ second.T).double() / (shares[0] * shares[1])
    signal = (between + between.T) / 2
    return Moments(signal, (whole @ whole.T).double() - signal)


def projected(
    vector: Float[Tensor, "p"], signs: Bool[Tensor, "p"], size: int
) -> Float[Tensor, "q"]:
    """Add each entry, negated where its sign is False, to one of `size` sums.

    With random signs, inner products keep their expectation and gain noise.
    """
    signed = torch.where(signs, vector, -vector)
    return pad(signed, (0, -len(vector) % size)).view(-1, size).sum(0)


def signal_to_noise(found: Moments, weights: Float[Tensor, "K"]) -> Float[Tensor, ""]:
    """Return the squared signal to noise of a batch whose steps have these weights."""
    return (weights @ found.signal @ weights) / (weights @ found.noise @ weights)


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


def above_noise(found: Moments) -> Moments:
    """Return the same noise, and of the signal what stands out from the error of its estimate.

    In units of each step's noise the estimate has eigenvalues, which truly are 0 or above: the
    lowest says how far they are off, and all are lowered by as much, down to 0.
    """
    unit = found.noise.diagonal().clamp(min=torch.finfo(found.noise.dtype).tiny).sqrt()
    values, vectors = torch.linalg.eigh(found.signal / (unit[:, None] * unit))
    kept = (values + values[:1].clamp(max=0)).clamp(min=0)
    signal = (vectors * kept) @ vectors.T * (unit[:, None] * unit)
    return Moments(signal, found.noise)


def crossed(products: Float[Tensor, "B K B K"]) -> Float[Tensor, ""]:
    """Return the signal to noise of the best weights, found on one half of the batches each.

    Weights that are judged by the batches which chose them look better than they are.

    Raises:
        ValueError: There are fewer than four batches.
    """
    if len(products) < 4:
        raise ValueError(f"there are gradients of {len(products)} batches; halves need at least 4")
    halves = [moments(products[start::2][:, :, start::2]) for start in (0, 1)]
    judged = [signal_to_noise(halves[1 - i], best_weights(half)) for i, half in enumerate(halves)]
    return torch.stack(judged).nan_to_num().mean()


def jackknife(
    products: Float[Tensor, "B K B K"], statistic: Callable[[Moments], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return a statistic of the moments, and its standard error by leaving out one batch each.

    Raises:
        ValueError: There are fewer than three batches.
    """
    count = len(products)
    if count < 3:
        raise ValueError(f"there are gradients of {count} batches; an interval needs at least 3")
    kept = [[b for b in range(count) if b != out] for out in range(count)]
    left = torch.stack([statistic(moments(products[k][:, :, k])) for k in kept])
    spread = (left - left.mean(0)).square().sum(0) * (count - 1) / count
    return statistic(moments(products)), spread.sqrt()

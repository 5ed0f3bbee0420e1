"""Notice that a run degrades: test its evaluations, and measure its images without rewards.

Evaluation e of a run tests J metrics at the level alpha * 6 / (pi^2 e^2 J). The levels of all
evaluations and metrics add up to alpha, so the probability of any false alarm is at most alpha,
however long the run is and however its evaluations depend on each other. The units are prompts.
Each test is exact for normal differences. With exponential differences of 48 prompts (skewness 2),
a test at the level 0.0004 rejects 2.3 times too often, and Student's test 15 times.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d, pad

_POINTS = 4001
"""Number of points of the quadrature over an angle; odd for Simpson's rule."""


def spend_level(alpha: float, evaluation: int, num_metrics: int) -> float:
    """Return the level of one metric's test at one evaluation, counted from 1."""
    return alpha * 6 / (math.pi**2 * evaluation**2 * num_metrics)


def student_tail(t: Float[Tensor, "*m"], dof: int) -> Float[Tensor, "*m"]:
    """Return P(T > t) for Student's t with `dof` degrees of freedom.

    With t = sqrt(dof) tan(a), the tail is the integral of cos(a)^(dof - 1) over the angles above a,
    relative to that over all angles.
    """
    start = torch.atan(t.double() / dof**0.5)
    grid = torch.linspace(0, 1, _POINTS, dtype=torch.float64)
    weight = torch.full_like(grid, 2.0)
    weight[1::2], weight[0], weight[-1] = 4.0, 1.0, 1.0
    length = math.pi / 2 - start
    angles = start[..., None] + length[..., None] * grid
    area = (angles.cos().clamp(min=0) ** (dof - 1)) @ weight * length / (3 * (_POINTS - 1))
    log_scale = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(math.pi)
    return (area * math.exp(log_scale)).clamp(0, 1)


def student_quantile(level: float, dof: int) -> float:
    """Return t with P(T > t) = level, by bisection."""
    low, high = -1e4, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        above = float(student_tail(torch.tensor(middle, dtype=torch.float64), dof)) > level
        low, high = (middle, high) if above else (low, middle)
    return (low + high) / 2


def lower_p(d: Float[Tensor, "n"], tolerance: float = 0.0) -> float:
    """Return the p-value of the claim that the mean of d is below -tolerance.

    `d` holds one paired difference per prompt. The test is one-sided, with `corrected_t`. Constant
    differences give 0 or 1. The p-value is 1 for fewer than two prompts.
    """
    shift = d.double() + tolerance
    if len(d) < 2:
        return 1.0
    if shift.min() == shift.max():
        return 0.0 if shift[0] < 0 else 1.0
    return float(student_tail(-corrected_t(shift), len(d) - 1))


def corrected_t(d: Float[Tensor, "*m n"]) -> Float[Tensor, "*m"]:
    """Return the larger of Student's t and t without the influence of skewness.

    Few large values lower t too often. Hall's transformation (J. R. Stat. Soc. B 54, 1992, page
    221) repairs this to first order: t + a t^2 / 3 + a^2 t^3 / 27 + a / 6, a = skewness / sqrt(n).
    The larger value makes the test for a low mean the stricter one of both.
    """
    n, mean = d.shape[-1], d.mean(-1)
    centred = d - mean[..., None]
    deviation = centred.square().mean(-1).sqrt()
    t = mean / deviation * (n - 1) ** 0.5
    a = centred.pow(3).mean(-1) / deviation.pow(3) / n**0.5
    return torch.maximum(t, t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6)


def lower_bound(d: Float[Tensor, "n"], level: float) -> float:
    """Return the bound that the mean of d exceeds with confidence 1 - level."""
    n = len(d)
    if n < 2:
        return -math.inf
    return float(d.double().mean() - student_quantile(level, n - 1) * d.double().std() / n**0.5)


LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""
_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


def variance_of_laplacian(media: Float[Tensor, "n F 3 H W"]) -> Float[Tensor, "n"]:
    """Return the variance over pixels of each frame's Laplacian, averaged over frames.

    The Laplacian is computed on the brightness in [0, 1] with replicated borders. Blur lowers the
    variance and noise raises it. The variance is quadratic in the contrast. Source: Pech-Pacheco et
    al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    luma = torch.einsum("nfchw,c->nfhw", media, media.new_tensor(LUMA))
    frames = pad(luma.flatten(0, 1)[:, None], (1, 1, 1, 1), mode="replicate")
    edges = conv2d(frames, media.new_tensor(_LAPLACIAN)[None, None])
    return edges.flatten(1).var(dim=1, correction=0).unflatten(0, media.shape[:2]).mean(dim=1)


def dark_share(media: Float[Tensor, "n F 3 H W"]) -> Float[Tensor, "n"]:
    """Return the share of pixels with a brightness below 0.1."""
    return (_brightness(media) < 0.1).float().flatten(1).mean(1)


def grid_power(media: Float[Tensor, "n F 3 H W"]) -> Float[Tensor, "n"]:
    """Return the log10 of the power at the frequencies of a grid, relative to other frequencies.

    A pattern that repeats every 8 pixels, the size of a VAE cell, has its power at multiples of 1/8
    cycles per pixel along an axis. The reference is the median power at all other frequencies of
    the axes. Images must have at least 16 pixels per side.
    """
    luma = _brightness(media)
    excess = [_axis_excess(luma.mean(axis)) for axis in (-1, -2)]
    return torch.stack(excess).mean(0).mean(1)


def _axis_excess(line: Float[Tensor, "n F L"]) -> Float[Tensor, "n F"]:
    """Return the log ratio of the mean power at the grid's frequencies to the median elsewhere."""
    power = torch.fft.rfft(line - line.mean(-1, keepdim=True)).abs() ** 2
    length = line.shape[-1]
    grid = sorted({round(length * k / 8) for k in range(1, 5)})
    rest = [k for k in range(1, power.shape[-1]) if k not in grid]
    floor = 1e-6
    inside, outside = power[..., grid].mean(-1), power[..., rest].median(-1).values
    return torch.log10((inside + floor) / (outside + floor))


def _brightness(media: Float[Tensor, "n F 3 H W"]) -> Float[Tensor, "n F H W"]:
    return torch.einsum("nfchw,c->nfhw", media.float(), media.new_tensor(LUMA).float())

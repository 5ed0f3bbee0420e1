"""Measure images in ways that rewards do not, to notice that they degrade.

Every function returns one number per sample, averaged over its frames. Source of the sharpness:
Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d, pad

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""
_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


def variance_of_laplacian(media: Float[Tensor, "n F 3 H W"]) -> Float[Tensor, "n"]:
    """Return the variance over pixels of each frame's Laplacian, averaged over frames.

    The Laplacian is computed on the brightness in [0, 1] with replicated borders. Blur lowers the
    variance and noise raises it. The variance is quadratic in the contrast.
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

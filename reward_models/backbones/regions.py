"""Finds connected regions of images, and measures their position and shape."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


def label_components(mask: Bool[Tensor, "n H W"]) -> Int[Tensor, "n H W"]:
    """Label eight-connected components by spreading the largest label; 0 is background."""
    labels = torch.arange(1, mask[0].numel() + 1, dtype=torch.float32).view(mask[0].shape) * mask
    while True:
        spread = F.max_pool2d(labels[:, None], 3, 1, 1)[:, 0] * mask
        if torch.equal(spread, labels):
            return labels.long()
        labels = spread


def match_shapes(mask: Bool[Tensor, "m H W"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each region's best ideal shape and their IoU, and its box's centre and half size.

    The ideal shapes are a circle, a square and a triangle.
    """
    u, half_x, centre_x = _box_coordinates(mask.any(1))
    w, half_y, centre_y = _box_coordinates(mask.any(2))
    u, w = u[:, None, :], w[:, :, None]
    inside = (u.abs() <= 1) & (w.abs() <= 1)
    ideals = torch.stack(
        [u**2 + w**2 <= 1.08, inside, inside & (u.abs() <= (w + 1) / 2 + 0.1)], dim=1
    )
    overlap = (ideals & mask[:, None]).flatten(2).sum(2)
    union = (ideals | mask[:, None]).flatten(2).sum(2).clamp(min=1)
    # A sliver fits any ideal in its own bounding box, so regions far from square lose fit.
    aspect = torch.minimum(half_x, half_y) / torch.maximum(half_x, half_y).clamp(min=0.5)
    fit, shape = (overlap / union).max(1)
    fit = fit * (aspect / 0.75).clamp(max=1)
    centre, half = torch.stack([centre_x, centre_y], 1), torch.stack([half_x, half_y], 1)
    return shape, fit, centre, half


def _box_coordinates(occupied: Bool[Tensor, "m L"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return coordinates with the occupied range scaled to [-1, 1], its half width and centre."""
    index = torch.arange(occupied.shape[-1], dtype=torch.float32)
    low = torch.where(occupied, index, torch.inf).amin(-1)
    high = torch.where(occupied, index, -torch.inf).amax(-1)
    half, centre = (high - low + 1) / 2, (high + low) / 2
    return (index - centre[..., None]) / half[..., None], half, centre


def find_centroids(mask: Bool[Tensor, "m H W"]) -> Float[Tensor, "m 2"]:
    """Return the mean of each region's pixels, x then y."""
    area = mask.flatten(1).sum(1)
    sums = [(mask.sum(axis) * torch.arange(mask.shape[3 - axis])).sum(1) for axis in (1, 2)]
    return torch.stack([along / area for along in sums], 1)

"""Resize and normalise importance maps from datasets and rewards for the grid of latents.

A map has a weight >= 0 for every position: [h, w] for an image, [F, h, w] for a clip, at any
resolution. Maps come from dataset files or rewards. Losses multiply errors by them.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate


def average_on_grid(
    maps: Float[Tensor, "n *place"], grid: tuple[int, ...]
) -> Float[Tensor, "n 1 *grid"]:
    """Return maps, averaged onto a grid with the same number of axes, with one channel."""
    return interpolate(maps[:, None].float(), size=grid, mode="area")


def normalise_mean(maps: Float[Tensor, "n *map"]) -> Float[Tensor, "n *map"]:
    """Return maps scaled to mean 1; a map of zeros, or with a non-finite value, becomes ones."""
    flat = maps.flatten(1)
    known = flat.isfinite().all(1) & (flat.sum(1) > 0)
    row = (-1, *[1] * (maps.ndim - 1))
    mean = flat.mean(1).where(known, 1.0).reshape(row)
    return torch.where(known.reshape(row), maps / mean, 1.0)


def paint_boxes(
    boxes: Float[Tensor, "m 4"],
    values: Float[Tensor, "m"],
    height: int,
    width: int,
    elsewhere: float,
    best: bool = True,
) -> Float[Tensor, "height width"]:
    """Return a map with boxes (left, top, right, bottom in pixels) filled with their values.

    The rest of the map is `elsewhere`. Where boxes overlap, the highest value counts if `best`,
    else the lowest.
    """
    order = values.argsort(descending=not best)
    picture = torch.full((height, width), elsewhere)
    for box, value in zip(boxes[order].tolist(), values[order].tolist(), strict=True):
        left, top, right, bottom = (max(round(edge), 0) for edge in box)
        picture[top:bottom, left:right] = value
    return picture

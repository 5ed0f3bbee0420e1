"""Weigh the places of media: maps of datasets and of rewards, brought onto the grid of latents.

A map has a number of at least 0 for every place: [h, w] of a picture, [F, h, w] of a clip, at any
resolution. Datasets hold it in files, rewards return it, and losses weigh errors by it.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate


def average_on_grid(
    maps: Float[Tensor, "n *place"], grid: tuple[int, ...]
) -> Float[Tensor, "n 1 *grid"]:
    """Average maps onto a grid with as many axes, one channel each."""
    return interpolate(maps[:, None].float(), size=grid, mode="area")


def normalise_mean(maps: Float[Tensor, "n *map"]) -> Float[Tensor, "n *map"]:
    """Scale each map to mean 1; one that is 0 everywhere, or unknown somewhere, becomes ones."""
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
    """Paint boxes, left, top, right and bottom in pixels, with values; other places get another.

    Where boxes overlap, the highest value counts if `best`, else the lowest.
    """
    order = values.argsort(descending=not best)
    picture = torch.full((height, width), elsewhere)
    for box, value in zip(boxes[order].tolist(), values[order].tolist(), strict=True):
        left, top, right, bottom = (max(round(edge), 0) for edge in box)
        picture[top:bottom, left:right] = value
    return picture

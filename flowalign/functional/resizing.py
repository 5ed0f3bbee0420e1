"""Resize images, masks and importance maps, and normalise the maps for the grid of latents.

A map has a weight >= 0 for every position: [h, w] for an image, [F, h, w] for a clip, at any
resolution. Maps come from dataset files or rewards. Losses multiply errors by them.

Focus weights patches by their match to a reference subject and by their detail. Source: FocusDPO,
arXiv:2509.01181; a reconstruction from the abstract. According to the abstract, focus regions come
from the correspondence to the reference and from its complexity, and change with the noise level.
Information-rich patches weigh more, uncertain patches less. The formulas are our choice.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, normalize

from flowalign.functional.transition import per_row


def resize_to_cover(
    pictures: Float[Tensor, "n 3 h w"], height: int, width: int
) -> Float[Tensor, "n 3 height width"]:
    """Resize images to cover the target size, keeping the aspect ratio, and crop the centre.

    Resizing is bicubic with antialiasing, clamped to [0, 1]. Images of the target size do not
    change.
    """
    h, w = pictures.shape[-2:]
    scale = max(height / h, width / w)
    size = max(height, round(h * scale)), max(width, round(w * scale))
    if size != (h, w):
        resized = interpolate(pictures, size, mode="bicubic", antialias=True)
        pictures = resized.clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return pictures[..., top : top + height, left : left + width]


def hole_within(
    mask: Float[Tensor, "1 3 h w"], height: int, width: int
) -> Bool[Tensor, "1 1 height width"]:
    """Return True where a mask is white (>= 0.5) after `resize_to_cover`."""
    return resize_to_cover(mask, height, width).mean(1, keepdim=True) >= 0.5


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


def correspondence(
    features: Float[Tensor, "p D"], reference: Float[Tensor, "q D"]
) -> tuple[Float[Tensor, "p"], Int[Tensor, "p"]]:
    """Return each patch's cosine to its most similar reference patch, and the index of that patch.

    Negative cosines become 0, because the reference has no similar patch.
    """
    cosine = normalize(features, dim=1) @ normalize(reference, dim=1).T
    best, which = cosine.max(1)
    return best.clamp(0, 1), which


def complexity(patches: Float[Tensor, "q 3 h w"]) -> Float[Tensor, "q"]:
    """Return the pixel standard deviation of each patch, divided by the largest of all patches.

    A reference of one colour has complexity 0 everywhere.
    """
    spread = patches.flatten(2).std(2, correction=0).mean(1)
    return spread / spread.max().clamp(min=1e-6)


def focus(
    match: Float[Tensor, "p"], which: Int[Tensor, "p"], detail: Float[Tensor, "q"]
) -> Float[Tensor, "p"]:
    """Return match * (1 + detail) / 2, largest for close matches of detailed reference patches."""
    return match * (1 + detail[which]) / 2


def focus_weights(
    field: Float[Tensor, "n *mask"], sigma: Float[Tensor, "n"], floor: float, window: int
) -> Float[Tensor, "n *mask"]:
    """Return the weights of positions at a noise level, with mean 1 per row.

    The weights are floor + (1 - floor) f, then normalised. Here f = (1 - sigma) field + sigma m,
    and m is the mean of the field over windows of `window` positions, because only the layout is
    visible at pure noise. Positions without the subject have weight `floor` before normalisation.
    """
    pictures = field.flatten(0, -3)[:, None]
    coarse = avg_pool2d(pictures, window, 1, window // 2, count_include_pad=False)
    coarse = coarse.reshape(field.shape)
    noise = per_row(sigma, field)
    return normalise_mean(floor + (1 - floor) * torch.lerp(field, coarse, noise))

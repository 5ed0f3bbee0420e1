"""Pool the scores of a video's frames into one score, and tokens into regions."""

import math
from collections.abc import Sequence
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d

Pool = Literal["mean", "min", "soft_min"]


def soft_min(scores: Float[Tensor, "n F R"], temperature: float) -> Float[Tensor, "n R"]:
    """Return -temperature * log mean exp(-score / temperature) over frames, in score units.

    It lies between the mean, its limit for a high temperature, and the minimum, its limit for a low
    one; at most temperature * log F above the minimum. Every frame has a gradient, bad ones the
    largest.
    """
    frames = scores.shape[1]
    return temperature * (math.log(frames) - (-scores / temperature).logsumexp(1))


def pool_frames(
    scores: Float[Tensor, "n F R"], over: Pool, temperature: float | None = None
) -> Float[Tensor, "n R"]:
    """Return one score from those of F frames; only `soft_min` needs a temperature."""
    if over == "soft_min":
        assert temperature is not None, "soft_min has a temperature"
        return soft_min(scores, temperature)
    return scores.mean(1) if over == "mean" else scores.amin(1)


def token_grid(num_tokens: int, places: Sequence[int]) -> tuple[int, ...]:
    """Return how tokens lie in a latent of these places: rows and columns, of a clip frames first.

    A token covers a square of places of one frame, and tokens are in the order of the places.

    Raises:
        ValueError: No such squares make that many tokens.
    """
    *frames, height, width = places
    side = math.isqrt(math.prod(places) // num_tokens) or 1
    grid = (*frames, height // side, width // side)
    if math.prod(grid) != num_tokens or height % side or width % side:
        raise ValueError(f"{num_tokens} tokens are no grid over latents of {tuple(places)} places")
    return grid


def pool_regions(
    tokens: Float[Tensor, "n L D"], grid: Sequence[int], regions: Sequence[int]
) -> Float[Tensor, "n K D"]:
    """Return the mean of the tokens of each region, if the grid is divided into so many.

    Regions overlap where their number does not divide the grid's.
    """
    places = tokens.transpose(1, 2).unflatten(2, tuple(grid))
    *frames, rows, columns = regions
    if frames:
        means = adaptive_avg_pool3d(places, (frames[0], rows, columns))
    else:
        means = adaptive_avg_pool2d(places, (rows, columns))
    return means.flatten(2).transpose(1, 2)

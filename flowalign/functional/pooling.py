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

    The result lies between the minimum (low temperature) and the mean (high temperature), at most
    temperature * log F above the minimum. Every frame has a gradient; the worst frames have the
    largest.
    """
    frames = scores.shape[1]
    return temperature * (math.log(frames) - (-scores / temperature).logsumexp(1))


def pool_frames(
    scores: Float[Tensor, "n F R"], over: Pool, temperature: float | None = None
) -> Float[Tensor, "n R"]:
    """Return the scores pooled over F frames; only `soft_min` needs a temperature."""
    if over == "soft_min":
        assert temperature is not None, "soft_min has a temperature"
        return soft_min(scores, temperature)
    return scores.mean(1) if over == "mean" else scores.amin(1)


def token_grid(num_tokens: int, places: Sequence[int]) -> tuple[int, ...]:
    """Return the grid of tokens over a latent of shape `places`: (rows, columns) or (F, ...).

    Each token covers a square patch of one frame. Tokens are in row-major order.

    Raises:
        ValueError: No square patches give `num_tokens` tokens.
    """
    *frames, height, width = places
    side = math.isqrt(math.prod(places) // num_tokens) or 1
    grid = (*frames, height // side, width // side)
    if math.prod(grid) != num_tokens or height % side or width % side:
        raise ValueError(
            f"{num_tokens} tokens do not form a grid over latents of shape {tuple(places)}"
        )
    return grid


def pool_regions(
    tokens: Float[Tensor, "n L D"], grid: Sequence[int], regions: Sequence[int]
) -> Float[Tensor, "n K D"]:
    """Return the mean of the tokens in each region; `regions` is the number of regions per axis.

    Regions overlap if their number does not divide the size of the grid.
    """
    places = tokens.transpose(1, 2).unflatten(2, tuple(grid))
    *frames, rows, columns = regions
    if frames:
        means = adaptive_avg_pool3d(places, (frames[0], rows, columns))
    else:
        means = adaptive_avg_pool2d(places, (rows, columns))
    return means.flatten(2).transpose(1, 2)

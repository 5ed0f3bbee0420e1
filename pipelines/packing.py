"""Packs latents into tokens of 2 x 2, as the networks of FLUX.1 and Qwen-Image see them."""

from math import prod

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


def pack(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n tokens 4*c"]:
    """Return one token for every 2 x 2 latents, row by row."""
    return pixel_unshuffle(x, 2).flatten(2).mT


def unpack(tokens: Float[Tensor, "n tokens d"], grid: tuple[int, int]) -> Float[Tensor, "n c h w"]:
    """Return the latents of the first tokens, which fill a grid of these rows and columns."""
    return pixel_shuffle(tokens[:, : prod(grid)].mT.unflatten(2, grid), 2)


def positions(picture: int, grid: tuple[int, int], like: Tensor) -> Float[Tensor, "tokens 3"]:
    """Return number of the picture, row and column of each token of a grid."""
    rows, columns = (torch.arange(n, device=like.device) for n in grid)
    number = torch.tensor([picture], device=like.device)
    return torch.cartesian_prod(number, rows, columns).to(like.dtype)

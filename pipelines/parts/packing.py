"""Packs latents into tokens, and says where each token is, as networks of pictures see them."""

from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
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


def token_places(sizes: tuple[int, int, int, int], x: Tensor) -> Int[Tensor, "n tokens 4"]:
    """Return picture, row, column and word of every token of a grid, the same for each row of x."""
    axes = [torch.arange(size, device=x.device) for size in sizes]
    return torch.cartesian_prod(*axes).expand(len(x), -1, -1)


def grid_of(policy: Any, unit: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of squares of `unit` pixels in a policy's pictures.

    Raises:
        ValueError: A side is no multiple of it.
    """
    if policy.height % unit or policy.width % unit:
        raise ValueError(
            f"size {policy.width}x{policy.height}: both sides must be multiples of {unit} "
            f"for {policy.path}"
        )
    return policy.height // unit, policy.width // unit

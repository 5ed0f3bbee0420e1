"""Packs latents into tokens and computes token positions, as image transformers expect them."""

from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


def pack(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n tokens 4*c"]:
    """Return one token per 2 x 2 latents, row by row."""
    return pixel_unshuffle(x, 2).flatten(2).mT


def unpack(tokens: Float[Tensor, "n tokens d"], grid: tuple[int, int]) -> Float[Tensor, "n c h w"]:
    """Return the latents of the first tokens, which fill a grid of (rows, columns)."""
    return pixel_shuffle(tokens[:, : prod(grid)].mT.unflatten(2, grid), 2)


def positions(picture: int, grid: tuple[int, int], like: Tensor) -> Float[Tensor, "tokens 3"]:
    """Return (image index, row, column) of each token of a grid."""
    rows, columns = (torch.arange(n, device=like.device) for n in grid)
    number = torch.tensor([picture], device=like.device)
    return torch.cartesian_prod(number, rows, columns).to(like.dtype)


def token_places(sizes: tuple[int, int, int, int], x: Tensor) -> Int[Tensor, "n tokens 4"]:
    """Return (image index, row, column, text position) of every token, repeated per row of x."""
    axes = [torch.arange(size, device=x.device) for size in sizes]
    return torch.cartesian_prod(*axes).expand(len(x), -1, -1)


def grid_of(policy: Any, unit: int) -> tuple[int, int]:
    """Return the rows and columns of `unit` x `unit` pixel squares in a policy's images.

    Raises:
        ValueError: A side is not a multiple of `unit`.
    """
    if policy.height % unit or policy.width % unit:
        raise ValueError(
            f"size {policy.width}x{policy.height}: both sides must be multiples of {unit} "
            f"for {policy.path}"
        )
    return policy.height // unit, policy.width // unit

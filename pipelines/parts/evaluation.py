"""Packs latents into tokens, and evaluates velocities with guidance and rows of all shapes."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle
from torch.utils.weak import WeakTensorKeyDictionary

from flowalign.types import Cond

NEGATIVE = "_neg"
"""Suffix of condition names that belong to the negative prompt."""


def with_negatives(
    cond: Mapping[str, Tensor], negative: Mapping[str, Any], needed: bool
) -> dict[str, Tensor]:
    """Return `cond`, merged with the conditions of the negative prompt if `needed`."""
    others = {f"{name}{NEGATIVE}": value for name, value in negative.items()}
    return {**cond, **(others if needed else {})}


def read_with_negatives(
    read: Callable[[list[str]], dict[str, Tensor]],
    prompts: Sequence[str],
    negative: str,
    needed: bool,
) -> dict[str, Tensor]:
    """Return `read(prompts)`, merged with the conditions of the negative prompt if `needed`."""
    empty = read([negative] * len(prompts)) if needed else {}
    return with_negatives(read(list(prompts)), empty, needed)


def guide(
    evaluate: Callable[[Tensor, Tensor, Cond], Tensor],
    x: Float[Tensor, "n *latent"],
    time: Float[Tensor, "n *tokens"],
    cond: Cond,
    guidance: float,
) -> Float[Tensor, "n *latent"]:
    """Return v_neg + guidance (v - v_neg), both from one evaluation on twice the rows.

    A condition that has no negative counterpart is shared by both. If guidance <= 1, each sample is
    evaluated once and v is returned.
    """
    plain = {name: value for name, value in cond.items() if not name.endswith(NEGATIVE)}
    if guidance <= 1:
        return evaluate(x, time, plain)
    both = {n: torch.cat([cond.get(f"{n}{NEGATIVE}", value), value]) for n, value in plain.items()}
    v_neg, v = evaluate(torch.cat([x, x]), torch.cat([time, time]), both).chunk(2)
    return v_neg + guidance * (v - v_neg)


_READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Values of tensors that are alive, and that `read_once` has copied to the host."""


def stack_rows(rows: Sequence[Cond]) -> dict[str, Tensor]:
    """Return the stacked conditions of requests that were encoded one by one."""
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def read_once(numbers: Int[Tensor, "n"]) -> list[int]:
    """Return the values of a tensor that does not change, and remember them while it is alive.

    A copy from a GPU waits for all its work: conditions are the same in each denoising step, so
    their lengths are copied in the first step alone.
    """
    if numbers not in _READ:
        _READ[numbers] = numbers.tolist()
    return _READ[numbers]


def evaluate_by_kind(
    velocity: Callable[[Tensor, Tensor, Cond], Tensor],
    kind: Int[Tensor, "n"],
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "*n"],
    cond: Cond,
) -> Float[Tensor, "n *latent"]:
    """Return velocities of all rows, evaluating rows together only if their `kind` is equal."""
    kinds, sigma = read_once(kind), sigma.expand(len(x))
    if len(set(kinds)) == 1:
        return velocity(x, sigma, cond)
    v = torch.empty_like(x)
    for number in sorted(set(kinds)):
        rows = [i for i, one in enumerate(kinds) if one == number]
        v[rows] = velocity(x[rows], sigma[rows], _select(cond, rows))
    return v


def _select(cond: Cond, rows: list[int]) -> dict[str, Tensor]:
    """Return the conditions of some rows; their numbers need not be read from the device again."""
    some = {name: value[rows] for name, value in cond.items()}
    for name, value in cond.items():
        if value.ndim == 1 and not value.is_floating_point():
            values = read_once(value)
            _READ[some[name]] = [values[i] for i in rows]
    return some


def pack(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n tokens 4*c"]:
    """Return one token per 2 x 2 latents, row by row."""
    return pixel_unshuffle(x, 2).flatten(2).mT


def unpack(tokens: Float[Tensor, "n tokens d"], grid: Sequence[int]) -> Float[Tensor, "n c h w"]:
    """Return the latents of the first tokens, which fill a grid of (rows, columns)."""
    return pixel_shuffle(tokens[:, : prod(grid)].mT.unflatten(2, grid), 2)


def positions(picture: int, grid: Sequence[int], like: Tensor) -> Float[Tensor, "tokens 3"]:
    """Return (image index, row, column) of each token of a grid."""
    rows, columns = (torch.arange(n, device=like.device) for n in grid)
    number = torch.tensor([picture], device=like.device)
    return torch.cartesian_prod(number, rows, columns).to(like.dtype)


def token_places(sizes: Sequence[int], x: Tensor) -> Int[Tensor, "n tokens 4"]:
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

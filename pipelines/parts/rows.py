"""Evaluates rows in separate calls if their inputs differ in shape."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.types import Cond


def stack_rows(rows: Sequence[Cond]) -> dict[str, Tensor]:
    """Return the stacked conditions of requests that were encoded one by one."""
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def evaluate_by_kind(
    velocity: Callable[[Tensor, Tensor, Cond], Tensor],
    kind: Int[Tensor, "n"],
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "*n"],
    cond: Cond,
) -> Float[Tensor, "n *latent"]:
    """Return velocities of all rows, evaluating rows together only if their `kind` is equal."""
    sigma, v = sigma.expand(len(x)), torch.empty_like(x)
    for number in kind.unique():
        rows = kind == number
        some = {name: value[rows] for name, value in cond.items()}
        v[rows] = velocity(x[rows], sigma[rows], some)
    return v

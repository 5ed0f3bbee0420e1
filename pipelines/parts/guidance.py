"""Classifier-free guidance: conditions of a negative prompt, and velocities guided away from it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import Cond

NEGATIVE = "_neg"
"""Ending of the names of the negative prompt's conditions."""


def with_negatives(
    cond: Mapping[str, Tensor], negative: Mapping[str, Any], needed: bool
) -> dict[str, Tensor]:
    """Return conditions, and those of the negative prompt where they are needed."""
    others = {f"{name}{NEGATIVE}": value for name, value in negative.items()}
    return {**cond, **(others if needed else {})}


def read_with_negatives(
    read: Callable[[list[str]], dict[str, Tensor]],
    prompts: Sequence[str],
    negative: str,
    needed: bool,
) -> dict[str, Tensor]:
    """Return what `read` makes of prompts and, where it is needed, of a negative prompt."""
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

    A condition without a negative one is the same for both. Without guidance there is one row each.
    """
    plain = {name: value for name, value in cond.items() if not name.endswith(NEGATIVE)}
    if guidance <= 1:
        return evaluate(x, time, plain)
    both = {n: torch.cat([cond.get(f"{n}{NEGATIVE}", value), value]) for n, value in plain.items()}
    v_neg, v = evaluate(torch.cat([x, x]), torch.cat([time, time]), both).chunk(2)
    return v_neg + guidance * (v - v_neg)

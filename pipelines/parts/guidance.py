"""Classifier-free guidance: conditions of a negative prompt, and guided velocities."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

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

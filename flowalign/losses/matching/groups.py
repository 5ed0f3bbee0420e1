"""Compare the rows of a group, which may lie on several processes."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.forward_process import same_group
from flowalign.types import Batch, LossContext

GROUP_ADVANTAGE = frozenset({"advantage", "group", "old"})
"""Columns of losses that weight the samples of whole groups by advantages."""


def gather_groups(
    batch: Batch, context: LossContext, *values: Float[Tensor, "n"]
) -> tuple[Bool[Tensor, "n N"], list[Float[Tensor, "N"]]]:
    """Return the mask of rows on all processes in the same group, and their detached values."""
    group = batch["group"]
    # One gather for all columns. float64 represents the integer group ids exactly.
    table = torch.stack([group.double(), *(v.detach().double() for v in values)], 1)
    everyone = context.gather(table).to(group.device)
    columns = [column.to(v) for column, v in zip(everyone.T[1:], values, strict=True)]
    return same_group(group, everyone[:, 0].long()), columns


def require_groups_here(batch: Batch, context: LossContext, loss: str) -> Bool[Tensor, "n n"]:
    """Return the mask of rows in the same group.

    Raises:
        ValueError: A group has rows on other processes.
    """
    group = batch["group"]
    here = same_group(group, group)
    everywhere, _ = gather_groups(batch, context)
    if (here.sum(1) != everywhere.sum(1)).any():
        raise ValueError(
            f"recipe.loss {loss} needs all rows of a group on one process, and some groups are "
            "split between processes: give every process whole groups"
        )
    return here

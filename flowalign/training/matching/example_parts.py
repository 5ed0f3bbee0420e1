"""Take examples by index and prepare them for a policy; pairs stay together."""

from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from flowalign.types import Batch, Policy
from flowalign.types.batch import Values


def num_examples(examples: Batch) -> int:
    """Return the number of pairs, or of samples if there are no pairs."""
    return examples.num_rows // 2 if "pair" in examples else examples.num_rows


def pairs_of(columns: Mapping[str, Values]) -> Batch:
    """Return pairs of weight 1, from columns of the winners followed by the losers."""
    rows = Batch(columns)
    count = rows.num_rows // 2
    return rows.with_columns(
        pair=torch.arange(count).repeat(2),
        desirable=torch.arange(2 * count) < count,
        weight=torch.ones(2 * count),
    )


def take(examples: Batch, indices: Int[Tensor, "k"]) -> Batch:
    """Return the pairs, or samples, with these indices."""
    losers = [indices + num_examples(examples)] if "pair" in examples else []
    return examples.take(torch.cat([indices, *losers]))


def of_rows(examples: Batch, values: Tensor) -> Tensor:
    """Return the values of pairs, or samples, for each row."""
    return torch.cat([values, values]) if "pair" in examples else values


def prepare(examples: Batch, policy: Policy, device: torch.device) -> Batch:
    """Return examples on a device, with float32 latents and users in their conditioning."""
    rows = examples.to(device)
    rows = rows.with_columns(latents=rows["latents"].float())
    if "user" not in rows or not policy.user_conditioning:
        return rows
    return rows.with_columns(cond=policy.user_conditioning.add_users(rows["cond"], rows["user"]))

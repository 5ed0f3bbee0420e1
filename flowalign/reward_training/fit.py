"""Fit the weights of a reward, such as a checklist, to human comparisons of scored samples."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.reward_training.labelled_pairs import ScoredTable, pair_rows
from flowalign.types import Fit, Fittable, RewardModel


def find_fittable(models: Sequence[RewardModel], source: str) -> Fittable:
    """Return the one reward of a list that has weights to fit.

    Raises:
        ValueError: There is none, or there are several.
    """
    found = [model for model in models if isinstance(model, Fittable)]
    if len(found) != 1:
        names = ", ".join(model.spec.name for model in models)
        raise ValueError(
            f"{source} has {len(found)} rewards with weights to fit; it must have one; "
            f"its rewards: {names}"
        )
    return found[0]


def collect_comparisons(
    table: ScoredTable, dims: Sequence[str], column: str, source: Path
) -> tuple[Float[Tensor, "n F"], Float[Tensor, "n"]]:
    """Return leads of the first sample of each pair per dimension, and the votes for it.

    The votes are shares in [0, 1].

    Raises:
        ValueError: The table lacks a dimension or the column, or has too few comparisons in it.
    """
    for what, asked, there in (
        ("dimension", dims, table.scores),
        ("column", [column], table.humans),
    ):
        if missing := [name for name in asked if name not in there]:
            raise ValueError(
                f"{source} has no {what} {missing[0]}; it has {', '.join(there)}"[:400]
            )
    each = [pair_rows(table, dim, column) for dim in dims]
    if len({len(one.lead) for one in each}) > 1:
        raise ValueError(f"{source} has pairs without scores in some of {', '.join(dims)}"[:400])
    if len(each[0].lead) < 2:
        raise ValueError(f"{source} has {len(each[0].lead)} scored pairs in {column}; 2 are needed")
    return torch.stack([one.lead for one in each], 1), each[0].share


def fit_to_table(
    reward: Fittable,
    table: ScoredTable,
    source: Path,
    column: str,
    ridge: float,
    held_out: float,
    seed: int,
) -> Fit:
    """Fit the weights of a reward to a table that it scored."""
    lead, share = collect_comparisons(table, reward.fitted_dims, column, source)
    return reward.fit(lead, share, ridge, held_out, seed)

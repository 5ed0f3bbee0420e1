"""Select transitions to compare, and compute the preference loss of a comparison."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def step_dpo(
    log_ratio_winner: Float[Tensor, "n"], log_ratio_loser: Float[Tensor, "n"], beta: float
) -> Float[Tensor, "n"]:
    """Return -log sigmoid(beta * (log_ratio_winner - log_ratio_loser)).

    log_ratio is log pi - log pi_ref.

    Source: SPO, arXiv:2406.04314, and its code, which uses beta 10 and also averages
    log-probabilities over latent elements.
    """
    return -torch.nn.functional.logsigmoid(beta * (log_ratio_winner - log_ratio_loser))


def best_and_worst(
    value: Float[Tensor, "n"], group: Int[Tensor, "n"]
) -> tuple[Int[Tensor, "m"], Int[Tensor, "m"]]:
    """Return the indices of the highest and of the lowest value of each group.

    Groups with equal values are skipped.
    """
    # Two stable sorts: by group, and within a group by value.
    order = value.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    last = group.unique(return_counts=True)[1].cumsum(0)
    first = torch.cat([last.new_zeros(1), last[:-1]]) if len(last) else last
    best, worst = order[last - 1], order[first]
    differ = value[best] > value[worst]
    return best[differ], worst[differ]

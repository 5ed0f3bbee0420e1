"""Choose the samples that a KL applies to, and shape advantages by diversity (GARDO).

Source: GARDO, arXiv:2512.24138, Eq. (7) and Algorithm 1. The gate in the released code has the
opposite sign and is not followed.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def win_share(value: Float[Tensor, "n *aux"]) -> Float[Tensor, "n *aux"]:
    """Return the share of the remaining samples with a lower value, in each column."""
    below = (value[None] < value[:, None]).sum(1)
    return below / max(len(value) - 1, 1)


def reward_uncertainty(
    main: Float[Tensor, "n"], auxiliary: Float[Tensor, "n A"]
) -> Float[Tensor, "n"]:
    """Return U = w(main) - mean w(auxiliary), for the share w of the batch that a sample beats.

    U is high where the optimized reward likes a sample more than the auxiliary rewards do. It is 0
    if they order the batch alike. NaN where a reward failed. Without ties its batch mean is 0.
    """
    found = win_share(main) - win_share(auxiliary).mean(1)
    failed = main.isnan() | auxiliary.isnan().any(1)
    return found.masked_fill(failed, torch.nan)


def most_uncertain(uncertainty: Float[Tensor, "n"], share: float) -> Bool[Tensor, "n"]:
    """Return True for samples with U above its (1 - share) quantile; share 1: all samples."""
    if share >= 1:
        return torch.ones_like(uncertainty, dtype=torch.bool)
    return uncertainty > uncertainty.nanquantile(1 - share)


def nearest_distance(features: Float[Tensor, "B D"], group_size: int) -> Float[Tensor, "B"]:
    """Return the cosine distance of each sample to the nearest other sample of its group."""
    unit = torch.nn.functional.normalize(features.float(), dim=1).unflatten(0, (-1, group_size))
    distance = 1 - unit @ unit.transpose(1, 2)
    own = torch.eye(group_size, dtype=torch.bool, device=features.device)
    return distance.masked_fill(own, torch.inf).amin(2).flatten().clamp(min=0)


def favour_diversity(
    advantage: Float[Tensor, "B T"], distance: Float[Tensor, "B"]
) -> Float[Tensor, "B T"]:
    """Return A d where A > 0, else A, for the distance d of a sample to its nearest neighbour."""
    return torch.where(advantage > 0, advantage * distance[:, None], advantage)

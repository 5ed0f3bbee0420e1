"""Fit accepted moves of samples along the reward gradient (MEND).

Source: MEND, arXiv:2610.05954, and code of shreshthsaini/MEND-RL.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.transition import per_row
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss


def raise_floor(floor: float | None, reward: Float[Tensor, "n"]) -> float:
    """Return the lowest cap: it follows the median of all rewards upwards, and never falls.

    Unknown rewards (NaN) are left out. It is NaN until a reward is known.
    """
    median = float(reward.nanquantile(0.5))
    if floor is None or math.isnan(floor):
        return median
    return max(floor, floor + 0.1 * (median - floor))


def reward_cap(
    reward: Float[Tensor, "n"], group: Int[Tensor, "n"], quantile: float, floor: float
) -> Float[Tensor, "n"]:
    """Return the larger of the floor and the quantile of the rewards of the row's group.

    Unknown rewards (NaN) are left out.
    """
    cap = torch.empty_like(reward)
    for one in group.unique():
        rows = group == one
        cap[rows] = reward[rows].nanquantile(quantile).clamp(min=floor)
    return cap


def propose(
    gradient: Float[Tensor, "n *latent"], lengths: Sequence[float]
) -> list[Float[Tensor, "n *latent"]]:
    """Return moves along the gradient, whose root mean squares are the lengths."""
    rms = gradient.flatten(1).square().mean(1).sqrt()
    return [length * gradient / per_row(rms + 1e-12, gradient) for length in lengths]


def accept_moves(
    moves: Sequence[Float[Tensor, "n *latent"]],
    rewards: Sequence[Float[Tensor, "n"]],
    reward: Float[Tensor, "n"],
    cap: Float[Tensor, "n"],
    price: float,
) -> Float[Tensor, "n *latent"]:
    """Return the best move of each row; 0 if staying is as good.

    A move d to the reward R is worth min(R, cap) - mean(d^2) / (2 price). An unknown reward (NaN)
    is never accepted. A `price` is the paper's tau: the larger it is, the cheaper are moves.
    """
    options = torch.stack([torch.zeros_like(moves[0]), *moves])
    costs = options.flatten(2).square().mean(2) / (2 * price)
    worth = torch.stack([reward, *rewards]).minimum(cap) - costs
    best = worth.nan_to_num(nan=-math.inf).argmax(0)  # of equal ones the first, which stays
    return options[best, torch.arange(len(reward))]


def adapt_price(price: float, accepted: float, proposed: float) -> float:
    """Return the price of the next step, which keeps 30 to 60 % of the proposals accepted."""
    share = accepted / proposed if proposed else 0.5
    factor = 1.5 if share < 0.3 else 1 / 1.5 if share > 0.6 else 1.0
    return min(max(price * factor, 1e-3), 10.0)


def mend(
    residual: Float[Tensor, "n *latent"],
    move: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Return mean((y - y_old - move)^2) for the clean predictions y = z - sigma v.

    `residual` is v - v_old at the same state z, so y - y_old = -sigma * residual.
    """
    return (per_row(sigma, residual) * residual + move).flatten(1).square().mean(1)


@dataclass(frozen=True, kw_only=True)
class MEND(MatchingLoss):
    """Mean of weight * mend over rows, at the states of `RewardProposals`.

    The examples are the old policy's clean predictions, so the residual of the policy is v - v_old.
    Gradients are about 1e-9: set `optimizer.eps` to 1e-12, since 1e-8 would stop the training.
    """

    paired, velocity = False, True
    reads = frozenset({"ascent"})

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        return self.mean(batch, mend(batch["policy"], batch["ascent"], batch["sigma"]), {})

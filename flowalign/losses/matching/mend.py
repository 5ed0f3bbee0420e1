"""Fit accepted moves of samples along the reward gradient (MEND).

Source: MEND, arXiv:2610.05954, and code of shreshthsaini/MEND-RL.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.transition import per_row
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss

_TINY = 1e-12
"""Added to the norm that divides a gradient."""
_FLOOR_RATE = 0.1
_FEWEST, _MOST, _FACTOR = 0.3, 0.6, 1.5
_CHEAPEST, _DEAREST = 1e-3, 10.0


def raise_floor(floor: float | None, reward: Float[Tensor, "n"]) -> float:
    """Return the lowest cap: it follows the median of all rewards upwards, and never falls."""
    median = float(reward.quantile(0.5))
    return median if floor is None else max(floor, floor + _FLOOR_RATE * (median - floor))


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
    direction = gradient / per_row(rms + _TINY, gradient)
    return [length * direction for length in lengths]


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
    best, chosen = reward.minimum(cap), torch.zeros_like(moves[0])
    for move, reached in zip(moves, rewards, strict=True):
        worth = reached.minimum(cap) - move.flatten(1).square().mean(1) / (2 * price)
        better = worth > best
        best = torch.where(better, worth, best)
        chosen = torch.where(per_row(better.to(worth), move) > 0, move, chosen)
    return chosen


def adapt_price(price: float, accepted: float, proposed: float) -> float:
    """Return the price of the next step, which keeps 30 to 60 % of the proposals accepted."""
    if not proposed:
        return price
    share = accepted / proposed
    factor = _FACTOR if share < _FEWEST else 1 / _FACTOR if share > _MOST else 1.0
    return min(max(price * factor, _CHEAPEST), _DEAREST)


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

    @property
    @override
    def needs(self) -> Set[str]:
        """Return the moves of the samples."""
        return {"ascent"}

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        move = batch["ascent"]
        each = mend(batch["policy"], move, batch["sigma"])
        loss = (batch["weight"] * each).mean()
        moved = move.flatten(1).square().mean(1)
        return loss, {"policy_loss": loss.detach(), "move_square": moved.mean()}

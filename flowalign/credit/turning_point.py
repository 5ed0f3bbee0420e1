"""Credit steps with gains, and steps that turn a trajectory around with all that follows.

Source: TP-GRPO, arXiv:2602.06422v1; code of YunzeTong/TurningPoint-GRPO.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import NonNegativeFloat

Constraint = Literal["consistent", "none"]


def turning_points(
    values: Float[Tensor, "B S R"],
    constraint: Constraint = "consistent",
    first_step: bool = True,
    dead_zone: float = 0.0,
) -> Float[Tensor, "B S-1 R"]:
    """Return 1 where a step turns the trend, 0 or less elsewhere, NaN if a value is missing for it.

    Step k turns if gain_{k-1} goes against the overall gain V_T - V_0 and gain_k goes with it (Def.
    4.1, constraint none) and the gain after it, V_T - V_{k+1}, has the sign of gain_k (Def. 5.1,
    consistent: the last step never turns). The first step has no step before it and turns if its
    gain has the sign of what follows, or, without constraint, of the overall gain. Changes of at
    most `dead_zone`, the noise of the reward, have sign 0 and turn nothing.
    """
    gain = _trend(values.diff(dim=1), dead_zone)
    overall = _trend(values[:, -1:] - values[:, :1], dead_zone)
    later = _trend(values[:, -1:] - values[:, 1:], dead_zone)
    turns = torch.minimum(-gain[:, :-1] * overall, gain[:, 1:] * overall)
    first = gain[:, :1] * overall
    if constraint == "consistent":
        turns = torch.minimum(turns, gain[:, 1:] * later[:, 1:])
        first = gain[:, :1] * later[:, :1]
    return torch.cat([first if first_step else torch.zeros_like(first), turns], dim=1)


def balance_turning_points(
    turning: Float[Tensor, "B n R"], values: Float[Tensor, "B S R"], group_size: int
) -> Float[Tensor, "B n R"]:
    """Keep as many turning points in rising as in falling trajectories of a group, zero the rest.

    Those of the largest |V_T - V_0| stay; ties go to the earlier sample, then the earlier step. A
    group that has only one kind keeps all. The reference code balances a micro-batch of mixed
    prompts.
    """
    overall = (values[:, -1:] - values[:, :1]).expand_as(turning)
    size = overall.reshape(-1, group_size * turning.shape[1], turning.shape[2])
    turns = (turning > 0).view_as(size)
    kinds = turns & (size > 0), turns & (size < 0)
    limit = torch.minimum(*(kind.sum(1, keepdim=True) for kind in kinds))
    balanced = turns & (limit == 0)
    for kind in kinds:
        largest = size.abs().masked_fill(~kind, -1.0).argsort(dim=1, descending=True, stable=True)
        balanced |= kind & (largest.argsort(1) < limit)
    return turning.masked_fill((turns & ~balanced).view_as(turning), 0.0)


def turning_point_credit(
    values: Float[Tensor, "B S R"], turning: Float[Tensor, "B S-1 R"]
) -> Float[Tensor, "B S-1 R"]:
    """Return V_T - V_k at turning points, V_{k+1} - V_k elsewhere, NaN where undecided."""
    remaining = values[:, -1:] - values[:, :-1]
    credit = torch.where(turning > 0, remaining, values.diff(dim=1))
    return credit.masked_fill(turning.isnan(), torch.nan)


@dataclass(frozen=True, kw_only=True)
class TurningPoint(CreditEstimator):
    """Each step earns its gain, and a step that turns the trend all that is gained from it on.

    V_0 is the value of the trajectory's own initial state; the reference code starts its ODE from
    other noise, which compares unrelated images. Reward dimensions turn independently.
    """

    constraint: Constraint = "consistent"
    """Definition of a turning point. consistent: Def. 5.1 of the paper. none: Def. 4.1."""
    first_step: bool = True
    """Let the first step be a turning point."""
    balance: bool = True
    """Keep as many turning points of rising as of falling trajectories per prompt."""
    dead_zone: NonNegativeFloat = 0.0
    """Largest change of value that has no sign, in units of the reward. 0 suits noiseless
    rewards."""

    def __post_init__(self) -> None:
        """Reject a negative dead zone."""
        if not self.dead_zone >= 0:
            raise ValueError(f"credit.dead_zone is {self.dead_zone}; it must be at least 0")

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step, and the outcome."""
        steps = stochastic_steps(trajectory)
        v = values([*steps, trajectory.num_steps])
        turning = turning_points(v, self.constraint, self.first_step, self.dead_zone)
        if self.balance:
            turning = balance_turning_points(turning, v, trajectory.group_size)
        marked = (turning > 0).any(-1)
        return step_credit(trajectory, steps, turning_point_credit(v, turning), marked)


def _trend(change: Tensor, dead_zone: float) -> Tensor:
    sign = change.sign().masked_fill(change.abs() <= dead_zone, 0.0)
    return sign.masked_fill(change.isnan(), torch.nan)  # torch.sign(nan) is 0

"""Credit steps with their gains, and turning points with the whole remaining gain.

Source: TP-GRPO, arXiv:2602.06422v1; code of YunzeTong/TurningPoint-GRPO.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.utils.ranges import NonNegativeFloat

Constraint = Literal["consistent", "none"]


def turning_points(
    values: Float[Tensor, "B S R"],
    constraint: Constraint = "consistent",
    first_step: bool = True,
    dead_zone: float = 0.0,
) -> Float[Tensor, "B S-1 R"]:
    """Return 1 at turning points, 0 or less elsewhere, and NaN if a required value is missing.

    Def. 4.1 (constraint none): step k is a turning point if gain_k has the sign of the overall gain
    V_T - V_0 and gain_{k-1} has the opposite sign. Def. 5.1 (consistent) also requires that the
    remaining gain V_T - V_{k+1} has the sign of gain_k, so the last step never is one.

    The first step has no step before it. It is a turning point if its gain has the sign of the
    remaining gain (consistent) or of the overall gain (none). Changes of at most `dead_zone`, the
    noise level of the reward, have sign 0 and make no turning point.
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
    """Keep equal numbers of turning points in rising and falling trajectories of a group.

    The turning points with the largest |V_T - V_0| stay, the rest become 0. Ties go to the earlier
    sample, then the earlier step. A group with only rising or only falling turning points keeps all
    of them. The released code balances micro-batches of mixed prompts instead.
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
    """Return V_T - V_k at turning points, V_{k+1} - V_k elsewhere, NaN where turning is NaN."""
    remaining = values[:, -1:] - values[:, :-1]
    credit = torch.where(turning > 0, remaining, values.diff(dim=1))
    return credit.masked_fill(turning.isnan(), torch.nan)


@dataclass(frozen=True, kw_only=True)
class TurningPoint(CreditEstimator):
    """Each step earns its gain, and a turning point earns the whole remaining gain.

    V_0 is the value of the trajectory's own initial state. The released code starts the ODE from
    different noise, which compares unrelated images. Each reward dimension has its own turning
    points.
    """

    constraint: Constraint = "consistent"
    """Definition of a turning point. consistent: Def. 5.1 of the paper. none: Def. 4.1."""
    first_step: bool = True
    """Whether the first step can be a turning point. Default: true."""
    balance: bool = True
    """Whether to keep equal numbers of turning points in rising and falling trajectories of a
    prompt. Default: true."""
    dead_zone: NonNegativeFloat = 0.0
    """Largest change of value that counts as no change, in units of the reward. 0 suits rewards
    without noise."""

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

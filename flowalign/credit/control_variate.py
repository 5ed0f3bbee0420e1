"""Subtract the best multiple of the previous value, between DenseGRPO's gain and no baseline.

The method is ours. V_k depends on nothing that step k draws, so any multiple of it may be
subtracted from V_{k+1} without biasing the policy gradient. A gain subtracts all of it, which adds
the noise of V_k wherever a step changes much of the image; the multiple of least variance is the
regression coefficient.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.credit.groups import per_prompt_and_step
from flowalign.functional.advantage import group_mean
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction


def explained(
    before: Float[Tensor, "n R"], after: Float[Tensor, "n R"], group: Int[Tensor, "n"]
) -> Float[Tensor, "R"]:
    """Return the slope of `after` on `before` within groups, clamped to [0, 1].

    It is 0 where `before` is constant. Samples with a missing value do not count.
    """
    known = (before.isfinite() & after.isfinite()).all(1)
    index = group[known].unique(return_inverse=True)[1]
    x, y = (v[known] - group_mean(v[known], index) for v in (before, after))
    variation = (x * x).sum(0)
    return ((x * y).sum(0) / torch.where(variation > 0, variation, 1.0)).clamp(0, 1)


@dataclass(frozen=True)
class ControlVariate(CreditEstimator):
    """Each stochastic step earns V_{k+1} - c_k V_k, c_k fitted to the samples of this process."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step, and the outcome."""
        steps = stochastic_steps(trajectory)
        v, group = values([*steps, trajectory.num_steps]), per_prompt_and_step(trajectory)[:, 0]
        pairs = zip(v[:, :-1].unbind(1), v[:, 1:].unbind(1), strict=True)
        credit = [after - explained(before, after, group) * before for before, after in pairs]
        return step_credit(trajectory, steps, torch.stack(credit, 1))

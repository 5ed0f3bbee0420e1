"""Subtract the best multiple of the previous value, between DenseGRPO's gain and no baseline.

The method is ours. V_k depends on nothing that step k draws, so any multiple of it may be
subtracted from V_{k+1} without biasing the policy gradient. A gain subtracts all of it, which adds
the noise of V_k wherever a step changes much of the image; the multiple of least variance is the
regression coefficient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.credit.group_ids import prompt_step_ids
from flowalign.functional.advantage import group_mean
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import NonNegativeInt


def estimate_slope(
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


@dataclass(frozen=True, kw_only=True)
class ControlVariate(CreditEstimator):
    """Each stochastic step earns V_{k+1} - c_k V_k, c_k fitted to the samples of this process.

    Where V_k is not bought, c_k is 0, and V_{k+1} is the next value that is: a later state's or the
    outcome.
    """

    steps: Sequence[NonNegativeInt] | None = None
    """Indices of the states whose values are bought, those of them that are noisy; null: all. An
    early state costs most evaluations and explains least."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the states before stochastic steps that are bought, and the outcome."""
        steps, last = stochastic_steps(trajectory), trajectory.num_steps - 1
        if any(k > last for k in self.steps or ()):
            raise ValueError(
                f"credit.steps is {list(self.steps or ())}; the denoising steps are 0 to {last}"
            )
        bought = steps if self.steps is None else [k for k in steps if k in self.steps]
        v = values([*bought, trajectory.num_steps])
        group, credit = prompt_step_ids(trajectory)[:, 0], []
        for k in steps:
            after = v[:, sum(state <= k for state in bought)]
            if k in bought:
                before = v[:, bought.index(k)]
                after = after - estimate_slope(before, after, group) * before
            credit.append(after)
        return step_credit(trajectory, steps, torch.stack(credit, 1))

"""Subtract the best multiple of the previous value, between DenseGRPO's gain and no baseline.

The method is our own; it is not published. V_k does not depend on the noise that step k draws, so
any multiple of it may be subtracted from V_{k+1} without biasing the policy gradient. A gain
subtracts all of V_k. This adds the noise of V_k if the step changes much of the image. The
regression coefficient is the multiple with the least variance.
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

    It is 0 if `before` is constant. Samples with a missing value are ignored.
    """
    known = (before.isfinite() & after.isfinite()).all(1)
    index = group[known].unique(return_inverse=True)[1]
    x, y = (v[known] - group_mean(v[known], index) for v in (before, after))
    variation = (x * x).sum(0)
    return ((x * y).sum(0) / torch.where(variation > 0, variation, 1.0)).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class ControlVariate(CreditEstimator):
    """Each stochastic step earns V_{k+1} - c_k V_k, c_k fitted to the samples of this process.

    States outside `steps` are not evaluated: their c_k is 0, and the next evaluated state or the
    outcome stands for V_{k+1}.
    """

    steps: Sequence[NonNegativeInt] | None = None
    """Indices of the states to evaluate; states before ODE steps are skipped. An early state costs
    the most network evaluations and explains the least variance. Null: all."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Evaluate the selected states before stochastic steps, and the outcome."""
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

"""Credit a step with the gains that follow it, predicted by a critic and discounted by lambda.

Source: generalised advantage estimation, arXiv:1506.02438, with gamma 1 and no reward but the last;
the critic is ours.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.credit.discounted import discounted_sums
from flowalign.credit.gain import gains
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import UnitInterval, require_ranges


def lambda_returns(values: Float[Tensor, "B S R"], decay: float) -> Float[Tensor, "B S-1 R"]:
    """Return sum_{l >= k} decay^(l - k) (V_{l+1} - V_l).

    decay 1 gives the outcome less V_k, whatever lies between; decay 0 the gain of step k alone.
    """
    return discounted_sums(gains(values), decay)


@dataclass(frozen=True, kw_only=True)
class LambdaReturn(CreditEstimator):
    """Each stochastic step earns the outcome less what its critic predicted before, or sooner.

    It needs `recipe.critic`, and no completion of a state.
    """

    decay: UnitInterval = 1.0
    """Lambda. 1: the outcome less the prediction before the step, unbiased however poor the critic
    is. Less: later steps are replaced by what the critic predicts after this one, which has less
    noise and the critic's bias."""

    def __post_init__(self) -> None:
        """Reject a lambda outside [0, 1]."""
        require_ranges(self, "credit")

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Predict the value before each stochastic step, and take the outcome."""
        steps = stochastic_steps(trajectory)
        before, outcome = values.predicted(steps), values([trajectory.num_steps])
        return step_credit(
            trajectory, steps, lambda_returns(torch.cat([before, outcome], 1), self.decay)
        )

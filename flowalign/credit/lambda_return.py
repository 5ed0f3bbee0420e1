"""Credit a step with the later changes of a critic's value, discounted by lambda.

Source: generalised advantage estimation, arXiv:1506.02438, with gamma 1 and only a terminal reward.
The critic is our choice.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.credit.gain import gains
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import UnitInterval


def lambda_returns(values: Float[Tensor, "B S R"], decay: float) -> Float[Tensor, "B S-1 R"]:
    """Return sum_{l >= k} decay^(l - k) (V_{l+1} - V_l).

    With decay 1 the sum is the outcome minus V_k. With decay 0 it is the gain of step k.
    """
    total, sums = torch.zeros_like(values[:, 0]), []
    for gain in reversed(gains(values).unbind(dim=1)):
        total = gain + decay * total
        sums.append(total)
    return torch.stack(sums[::-1], dim=1)


@dataclass(frozen=True, kw_only=True)
class LambdaReturn(CreditEstimator):
    """Each stochastic step earns the lambda return of the critic's values.

    The method needs `recipe.critic` and completes no states.
    """

    decay: UnitInterval = 1.0
    """Lambda of generalised advantage estimation. 1: the outcome minus the critic's prediction
    before the step, unbiased for any critic. Lower values replace later steps by the critic's
    prediction, which reduces noise but adds the critic's bias."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Predict the value before each stochastic step, and append the outcome."""
        steps = stochastic_steps(trajectory)
        before, outcome = values.predicted(steps), values([trajectory.num_steps])
        return step_credit(
            trajectory, steps, lambda_returns(torch.cat([before, outcome], 1), self.decay)
        )

"""Credit a step with the values of the states that follow, nearer ones counting more.

Source: VGPO, arXiv:2512.12387v1, known from its reviews: our reconstruction. VGPO values states by
the one-step prediction of the data, which is a matter of the recipe's completion. How it goes on to
weight advantages with these sums is not implemented.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import UnitInterval


def discounted_sums(next_values: Float[Tensor, "B n R"], gamma: float) -> Float[Tensor, "B n R"]:
    """Return r_k = sum over j >= k of gamma^(j-k) V_{j+1}, given V_{j+1} at index j."""
    total = torch.zeros_like(next_values[:, 0])
    sums = []
    for value in reversed(next_values.unbind(dim=1)):
        total = value + gamma * total
        sums.append(total)
    return torch.stack(sums[::-1], dim=1)


@dataclass(frozen=True)
class Discounted(CreditEstimator):
    """Each stochastic step earns the discounted sum of the values reached by it and later ones.

    Sums run over stochastic steps: an ODE step decides nothing and changes no value. Earlier steps
    have longer sums, so compare equal steps: not with advantages.scale joint.
    """

    gamma: UnitInterval
    """Discount in (0, 1]. No default, as the published value is not known to us; 0 would be
    NextValue."""

    def __post_init__(self) -> None:
        """Reject a gamma above 1, where far states count more, and one of 0 or less."""
        if not 0 < self.gamma <= 1:
            raise ValueError(f"credit.gamma is {self.gamma}; it must lie in (0, 1]")

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step but the first, and the outcome."""
        steps = stochastic_steps(trajectory)
        reached = values([*steps[1:], trajectory.num_steps])
        return step_credit(trajectory, steps, discounted_sums(reached, self.gamma))

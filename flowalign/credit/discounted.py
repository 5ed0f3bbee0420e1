"""Credit a step with the discounted values of the states that follow.

Source: VGPO, arXiv:2512.12387v1, reconstructed from its reviews. VGPO values a state by its
one-step prediction of the clean sample; set `recipe.completion` to choose this. Its weighting of
advantages by these sums is not implemented.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import Range


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
    """Each stochastic step earns the discounted sum of the values of all later states.

    Sums run over stochastic steps, because ODE steps change no value. Earlier steps have longer
    sums, so do not combine this method with advantages.scale: joint, which compares unequal steps.
    """

    gamma: Annotated[float, Range(above=0, most=1)]
    """Discount in (0, 1]. It has no default because we do not know the published value. A gamma
    of 0 would equal NextValue."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step but the first, and the outcome."""
        steps = stochastic_steps(trajectory)
        reached = values([*steps[1:], trajectory.num_steps])
        return step_credit(trajectory, steps, discounted_sums(reached, self.gamma))

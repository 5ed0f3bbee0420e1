"""Credit every stochastic step with the reward of the finished sample.

Source: Flow-GRPO, arXiv:2505.05470v5.
"""

from dataclasses import dataclass

from flowalign.credit.group_ids import prompt_step_ids
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction


@dataclass(frozen=True)
class Outcome(CreditEstimator):
    """Every stochastic step earns the terminal reward: the sparse baseline of dense methods."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Credit every stochastic transition with the value of the last state."""
        final = values([trajectory.num_steps])
        return StepCredit(
            value=final.expand(-1, trajectory.num_steps, -1),
            group=prompt_step_ids(trajectory),
            mask=trajectory.trained,
        )

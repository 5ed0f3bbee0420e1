"""Credit a step with its change of value: the reward of the sample that the ODE completes.

Source: DenseGRPO, arXiv:2601.20218v2. Its noise calibration is part of sampling, not of credit.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction


def gains(values: Float[Tensor, "B S R"]) -> Float[Tensor, "B S-1 R"]:
    """Return V_{k+1} - V_k. The gains of a trajectory sum to its last value minus its first."""
    return values.diff(dim=1)


@dataclass(frozen=True)
class Gain(CreditEstimator):
    """Each stochastic step earns its gain, the change of value V_{k+1} - V_k.

    Sources: DenseGRPO, arXiv:2601.20218v2, normalises each step separately. Stepwise-Flow-GRPO,
    arXiv:2603.28718, normalises all steps of a prompt together (advantages.scale: joint).
    """

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step, and the outcome."""
        steps = stochastic_steps(trajectory)
        return step_credit(trajectory, steps, gains(values([*steps, trajectory.num_steps])))


@dataclass(frozen=True)
class NextValue(CreditEstimator):
    """Each stochastic step earns V_{k+1}, the value of the state that it reached.

    Source: DenseGRPO's ablation "Dense Reward (Baseline)".
    """

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step but the first, and the outcome."""
        steps = stochastic_steps(trajectory)
        return step_credit(trajectory, steps, values([*steps[1:], trajectory.num_steps]))

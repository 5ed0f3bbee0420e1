"""Credit steps by a reward of noisy latents: nothing is finished, decoded or scored for it.

Sources: DiNa-LRM, arXiv:2602.11146, and PRFL, arXiv:2511.21541, for rewards that know noise;
Euphonium, arXiv:2602.04928, for process rewards beside an outcome. Credit by the gain of a latent
reward is DenseGRPO's (arXiv:2601.20218v2) with another value.
"""

from dataclasses import dataclass, replace

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.credit.gain import gains
from flowalign.credit.outcome import Outcome
from flowalign.types import CreditEstimator, LatentReward, StepCredit, Trajectory, ValueFunction


@dataclass(frozen=True, kw_only=True)
class LatentGain(CreditEstimator):
    """Each stochastic step earns what it adds to the latent reward of the state, up to the last.

    The last value is the latent reward of the clean latent; the outcome is only logged.
    """

    reward: LatentReward
    """Reward of noisy latents that has the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Score the state before each stochastic step, and the last."""
        steps = stochastic_steps(trajectory)
        scores = values.scored([*steps, trajectory.num_steps], self.reward)
        return step_credit(trajectory, steps, gains(scores))


@dataclass(frozen=True, kw_only=True)
class ProcessOutcome(CreditEstimator):
    """Each stochastic step earns the outcome and, apart from it, the latent reward it reached.

    Both are compared within prompt and step, and clipped apart; their losses are summed.

    Source: Euphonium, arXiv:2602.04928. Which state the process reward of a step scores is our
    reconstruction: the one that the step reached, on which its noise acts.
    """

    reward: LatentReward
    """Reward of noisy latents that has the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the last state, and score the state after each stochastic step."""
        steps = stochastic_steps(trajectory)
        reached = values.scored([k + 1 for k in steps], self.reward)
        process = step_credit(trajectory, steps, reached).value
        return replace(Outcome()(trajectory, values), process=process)

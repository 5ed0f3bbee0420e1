"""Credit steps with a reward model of noisy latents, without completing or decoding states.

Sources: DiNa-LRM, arXiv:2602.11146, and PRFL, arXiv:2511.21541, for noise-aware latent reward
models; Euphonium, arXiv:2602.04928, for process rewards in addition to an outcome. The gain of a
latent reward is DenseGRPO's credit (arXiv:2601.20218v2) with another value function.
"""

from dataclasses import dataclass, replace

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.credit.gain import gains
from flowalign.credit.outcome import Outcome
from flowalign.types import CreditEstimator, LatentReward, StepCredit, Trajectory, ValueFunction


@dataclass(frozen=True, kw_only=True)
class LatentGain(CreditEstimator):
    """Each stochastic step earns its change of the latent reward.

    The last value is the latent reward of the clean latent. The outcome is only logged.
    """

    reward: LatentReward
    """Reward model of noisy latents; it must return the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Score the state before each stochastic step, and the last state."""
        steps = stochastic_steps(trajectory)
        scores = values.scored([*steps, trajectory.num_steps], self.reward)
        return step_credit(trajectory, steps, gains(scores))


@dataclass(frozen=True, kw_only=True)
class ProcessOutcome(CreditEstimator):
    """Each stochastic step earns the outcome and the latent reward of the state it reached.

    The two get separate advantages within prompt and step, and separate clipped losses that are
    summed.

    Source: Euphonium, arXiv:2602.04928. The process reward scores the state after the step, because
    the step's noise acts on this state. This choice is our reconstruction.
    """

    reward: LatentReward
    """Reward model of noisy latents; it must return the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the last state, and score the state after each stochastic step."""
        steps = stochastic_steps(trajectory)
        reached = values.scored([k + 1 for k in steps], self.reward)
        process = step_credit(trajectory, steps, reached).value
        return replace(Outcome()(trajectory, values), process=process)

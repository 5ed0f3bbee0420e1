"""Credit a step with the latent reward of the state that it reached, compared with its siblings.

Source: the Step-wise GRPO of DRM, arXiv:2605.25661, from its page. Siblings are drawn from the same
state, and advantages are local to the step. The released code has no such loop; the candidate that
continues is not known. Here, the branching of the rollout decides it.
"""

from dataclasses import dataclass

from flowalign.credit.group_ids import sibling_ids
from flowalign.types import CreditEstimator, LatentReward, StepCredit, Trajectory, ValueFunction


@dataclass(frozen=True, kw_only=True)
class NextLatent(CreditEstimator):
    """Each transition earns the latent reward of its next state, without completion or decoding.

    It needs `sampling.branching: Comb` or `Tree`. The outcome is only logged.
    """

    reward: LatentReward
    """Reward model of noisy latents; it must return the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Score the state after each trained step; raise ValueError if no samples are siblings."""
        group, mask = sibling_ids(trajectory), trajectory.trained
        if len(group[mask].unique()) == int(mask.sum()):
            raise ValueError(
                "NextLatent compares samples that were drawn from the same state: set "
                "recipe.sampling.branching to flowalign.sampling.Comb or Tree"
            )
        steps = mask.any(0).nonzero()[:, 0].tolist()
        reached = values.scored([k + 1 for k in steps], self.reward)
        value = reached.new_zeros(len(reached), trajectory.num_steps, reached.shape[-1])
        value[:, steps] = reached
        return StepCredit(value, group, mask)

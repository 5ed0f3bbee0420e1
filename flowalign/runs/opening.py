"""Open the parts of a run without a run directory, to measure them one by one."""

import torch

from flowalign.distributed.processes import join
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.advantages import build_batch
from flowalign.training.policy_gradient.batches import TrainBatch
from flowalign.training.policy_gradient.loop import PolicyGradientLoop
from flowalign.training.policy_gradient.settings import CreditedRollouts, credited_rollouts
from flowalign.training.rollouts.advantages import (
    compute_advantages,
    compute_credit,
    gather_credit,
    process_advantages,
)
from flowalign.training.rollouts.collecting import completion_values
from flowalign.types import Trajectory
from flowalign.utils.costs import Costs


def opened(run: Run) -> tuple[CreditedRollouts, Learner, Rewards, Costs]:
    """Return the recipe, a learner with loaded weights, loaded rewards, and what they count.

    Raises:
        ValueError: The recipe has no rollouts that could be measured.
    """
    recipe = credited_rollouts(run.recipe)
    if run.threads:
        torch.set_num_threads(run.threads)
    processes = join(run.device)
    costs = Costs()
    rewards = run.build_rewards(costs)
    run.load_rewards(rewards)
    run.load_policy(processes, costs)
    learner = Learner(run.policy, run.optimizer, processes, run.num_steps, None)
    return recipe, learner, rewards, costs


def credited(
    recipe: CreditedRollouts, learner: Learner, loop: PolicyGradientLoop, trajectory: Trajectory
) -> TrainBatch:
    """Value, credit and compare a trajectory: the reward stage of a step."""
    values = completion_values(recipe, learner, loop.rewards, trajectory, loop.critic)
    gathered = gather_credit(loop.comparison, values, compute_credit(recipe, values))
    loop.learn(values)
    advantage = compute_advantages(recipe, loop.comparison, gathered.credit)
    process = process_advantages(recipe, loop.comparison, gathered.credit)
    return build_batch(recipe, learner.processes, values, gathered, advantage, process=process)

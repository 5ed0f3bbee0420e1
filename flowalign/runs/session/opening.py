"""Open the parts of a run without a run directory, to measure them one by one."""

from dataclasses import dataclass

import torch

from flowalign.data.requests import Requests, read_requests
from flowalign.distributed.processes import join
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import RolloutBatch
from flowalign.training.policy_gradient.build_batch import build_batch
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.policy_gradient.policy_gradient_settings import (
    PolicyGradientSettings,
    require_policy_gradient,
)
from flowalign.training.rollouts.collecting import completion_values
from flowalign.types import Trajectory
from flowalign.utils.costs import Costs


@dataclass(frozen=True)
class RunParts:
    """Loaded weights and rewards, shared by runs that differ only in the recipe."""

    learner: Learner
    """Policy with its optimizer."""
    rewards: Rewards
    """Loaded reward models."""
    costs: Costs
    """Counts of this process since the weights were loaded."""

    def build_loop(self, run: Run) -> PolicyGradientLoop:
        """Build the loop of a run with these weights and rewards."""
        recipe = require_policy_gradient(run.recipe)
        requests = Requests(read_requests(recipe.prompts), run.seed, run.conditioning)
        return PolicyGradientLoop(recipe, self.learner, self.rewards, requests, run.seed)


def open_run(run: Run) -> RunParts:
    """Load the weights and rewards of a run.

    Raises:
        ValueError: The recipe has no rollouts to measure.
    """
    require_policy_gradient(run.recipe)
    if run.threads:
        torch.set_num_threads(run.threads)
    processes = join(run.device)
    costs = Costs()
    rewards = run.build_rewards(costs)
    run.load_rewards(rewards)
    run.load_policy(processes, costs)
    learner = Learner(run.policy, run.optimizer, processes, run.num_steps, None)
    return RunParts(learner, rewards, costs)


def compute_batch(
    recipe: PolicyGradientSettings,
    learner: Learner,
    loop: PolicyGradientLoop,
    trajectory: Trajectory,
) -> RolloutBatch:
    """Return a trajectory with its values, credit and advantages: the reward stage of a step."""
    rollouts = loop.rollouts
    values = completion_values(rollouts.cfg, learner, rollouts.rewards, trajectory, rollouts.critic)
    estimate = rollouts.estimate(values)
    rollouts.learn_critic(values)
    return build_batch(recipe, learner.processes, values, estimate)

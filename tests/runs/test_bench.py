import pytest
import torch

from flowalign.data.requests import Requests
from flowalign.rewards.composite import Rewards
from flowalign.runs import bench
from flowalign.runs.config import load
from flowalign.training.policy_gradient.loop import update
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.types import plain_requests
from flowalign.utils.costs import Costs
from tests.fixtures.training import credited, new_learner

pytestmark = pytest.mark.slow

DENSE = "flowalign.credit.Gain"


@pytest.mark.parametrize(
    "overrides",
    [[], [f"recipe.credit={DENSE}"], ["recipe.algorithm.kl_coef=0.1", "recipe.epochs_per_step=2"]],
    ids=["outcome", "dense", "kl"],
)
def test_the_floor_is_the_evaluations_that_a_step_makes(overrides):
    sizes = {"prompts_per_step": 2, "sampling.samples_per_prompt": 3, "sampling.num_steps": 4}
    small = [f"recipe.{name}={size}" for name, size in sizes.items()]
    run, _ = load("configs/shapes.yaml", [*small, *overrides])
    run.policy.load(torch.device("cpu"))
    learner, costs = new_learner(policy=run.policy), Costs()
    costs.count(run.policy.denoiser)
    rewards = Rewards(run.rewards, run.reward_weights, "raise", costs)
    recipe = run.recipe
    trajectory = rollout(
        recipe, learner, Requests(plain_requests(["a red circle"])).batch(0, 2), 0, 0
    )
    batch, _ = credited(recipe, learner, completion_values(recipe, learner, rewards, trajectory))
    update(recipe, learner, batch, 0, 0)
    step = (costs.sampling_evaluations, costs.training_evaluations)
    bench._bare(recipe, run.policy, trajectory)
    floor = (costs.sampling_evaluations - step[0], costs.training_evaluations - step[1])
    assert floor == step

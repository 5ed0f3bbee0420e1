"""Every published method's run file on the one-pixel policy: its cost, and that it learns."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowalign import runs
from flowalign.runs.config import load
from flowalign.training.policy_gradient.batches import parts
from flowalign.training.policy_gradient.policy_gradient_loop import update
from flowalign.training.policy_gradient.step_plan import evaluations, plan_step
from flowalign.training.rollouts.collecting import rollout
from flowalign.types import plain_requests
from flowalign.utils.costs import Costs
from flowalign.utils.seeds import generator
from flowalign.utils.tracking import read_metrics
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy, moving_policy
from tests.fixtures.run_files import CONFIGS, loaded
from tests.fixtures.training import flat, new_learner, new_rewards, rise, train

pytestmark = pytest.mark.slow

METHODS = sorted((CONFIGS / "credit" / "toy_shapes").glob("*.yaml"))
OF_BLOCKS = [path for path in METHODS if path.stem in ("euphonium", "latent_gain", "step_grpo")]
"""Methods with a reward on the policy's first blocks, which the one-pixel policy lacks."""
OF_PIXELS = [path for path in METHODS if path not in OF_BLOCKS]
THREE = ("a", "bb", "ccc")


def recipe_of(path: Path):
    return replace(loaded(path)[0].recipe, prompts_per_step=3)


@pytest.fixture(scope="module", params=OF_PIXELS, ids=lambda p: p.stem)
def recipe(request):
    return recipe_of(request.param)


def test_a_step_costs_what_the_plan_says(recipe):
    """Network evaluations, images and reward calls of sampling, valuing and one update."""
    assert_costs(recipe, new_learner(moving_policy()), new_rewards(), THREE)


@pytest.mark.parametrize("path", OF_BLOCKS, ids=lambda p: p.stem)
def test_a_step_that_reads_blocks_costs_what_the_plan_says(path):
    run = loaded(path)[0]
    policy, rewards = copy.copy(run.policy), run.build_rewards()
    policy.load(torch.device("cpu"))
    run.load_rewards(rewards)
    recipe = recipe_of(path)
    samples = 2 if type(recipe.sampling.branching).__name__ == "Chain" else 12  # 4 x 3 branches
    few = replace(recipe, sampling=replace(recipe.sampling, samples_per_prompt=samples))
    prompts = ("a red circle", "two blue squares", "a green triangle")
    window = few.sampling.sde_window.steps(few.sampling.num_steps, 0, generator(0, "window", 0))
    scored = few.rollouts.requirements(window).scores
    distinct = few.rollouts.empty_trajectory(window).rows.unique_rows
    of_blocks = round(sum(one.evaluation_share * 3 * len(distinct(k)) for one, k in scored))
    planned = plan_step(few, run.context(rewards), policy.plan(), 1).work.evaluations
    assert of_blocks == round(planned["sampling by latent rewards"])
    gradients = planned["sampling with reward gradients"]
    assert_costs(few, new_learner(policy), rewards, prompts, of_blocks, gradients)


def assert_costs(recipe, learner, rewards, prompts, of_blocks=0, gradients=0) -> None:
    rewards.costs = costs = Costs()
    costs.count(learner.policy.denoiser)
    sampling = recipe.sampling
    window = sampling.sde_window.steps(sampling.num_steps, 0, generator(0, "window", 0))
    wanted = evaluations(recipe, window)
    empty_trajectory, asked = (
        recipe.rollouts.empty_trajectory(window),
        recipe.rollouts.requested(window),
    )
    trajectory = rollout(recipe.rollouts, learner, plain_requests(prompts), 0, 0)
    batch, _ = judged(recipe, learner, rewards, trajectory=trajectory)
    whole = 3 * (wanted["sampling"] + wanted["completing"])
    assert costs.sampling_evaluations == whole + of_blocks
    assert costs.training_evaluations == (gradients or 0), "gradients count as whole evaluations"
    costs.training_evaluations = 0
    valued = {*asked, (sampling.num_steps, recipe.completion)}
    scored = 3 * sum(len(empty_trajectory.rows.unique_rows(k)) for k, _ in valued)
    assert costs.decodes == costs.reward_calls == scored
    update(recipe, learner, batch, 0, 0)
    if type(recipe.credit).__name__ == "Contrast" or recipe.algorithm.pairs:
        assert 0 < costs.training_evaluations <= 3 * wanted["training"], "only extremes are trained"
    elif recipe.updates_per_step > 1 and type(sampling.branching).__name__ != "Chain":
        # siblings may fall into several updates, each of which then evaluates their state
        assert costs.training_evaluations == states_of_updates(recipe, batch)
        assert costs.training_evaluations <= 3 * wanted["training"]
    else:
        assert costs.training_evaluations == 3 * wanted["training"]


def states_of_updates(recipe, batch) -> int:
    """The states that trained transitions leave, counted in each update by itself."""
    orders = [generator(0, "order", 0, epoch) for epoch in range(recipe.epochs_per_step)]
    updates = [part for order in orders for part in parts(batch, recipe.updates_per_step, order)]
    source, steps = batch.trajectory.rows.source_row, range(batch.mask.shape[1])
    left = [source[part[batch.mask[part, k]], k] for part in updates for k in steps]
    return sum(len(states.unique()) for states in left)


def test_it_moves_the_weights_towards_the_reward(recipe):
    learner = new_learner(PixelPolicy(), learning_rate=6e-2)
    before = flat(learner.policy.denoiser)
    metrics = train(recipe, learner, steps=7)
    assert not torch.equal(flat(learner.policy.denoiser), before)
    assert rise(metrics) > 0.3


def test_dynamic_treerpo_raises_the_reward_of_the_toy_model(tmp_path):
    """A step cannot show a collapse. With a term that is gone, the reward fell from .45 to .13.

    Nine steps of half the denoising steps raise the mean of the last four by .03 to .09 over that
    of the first two (three seeds). Band: at least .02.
    """
    few = ["num_steps=9", "recipe.sampling.num_steps=5", "evaluation=null"]
    few += ["checkpoints.verify=never", f"output_dir={tmp_path / 'run'}"]
    run, text = load(str(CONFIGS / "credit/toy_shapes/dynamic_treerpo.yaml"), few)
    assert runs.train(runs.start(run, text, lambda _: None))["status"] == "finished"
    reward = [row["reward_mean"] for row in read_metrics(tmp_path / "run")]
    assert sum(reward[-4:]) / 4 > sum(reward[:2]) / 2 + 0.02

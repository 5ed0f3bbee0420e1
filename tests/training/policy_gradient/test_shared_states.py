"""Transitions that leave one state are evaluated together: once, with the same gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowalign.credit import Branch, Gain
from flowalign.data.requests import Requests
from flowalign.losses import GRPO, PPOClip, StepDPO
from flowalign.runs.bench import start_temporarily
from flowalign.runs.config import load
from flowalign.runs.planning import plan
from flowalign.sampling import Comb, Fixed, Tree
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.gardo import ResetReference
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop, update
from flowalign.training.policy_gradient.step_gradients import MeasuredWeight
from flowalign.training.policy_gradient.step_plan import evaluations
from flowalign.training.recipe import RunContext
from flowalign.types import Setup, Sharding, plain_requests
from flowalign.types.losses import first_of_each
from flowalign.utils.costs import Costs
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy, moving_policy
from tests.fixtures.training import (
    PROMPTS,
    as_recipe,
    flat,
    new_learner,
    new_recipe,
    new_rewards,
    train,
)

WINDOW = {"sde_window": Fixed(start=0, stop=2)}
SHARED = {
    "one noise": (new_recipe(WINDOW | {"seeds_per_prompt": 1}), [1, 4]),
    "a tree": (new_recipe(WINDOW | {"branching": Tree()}, credit=Branch()), [1, 2]),
    "a comb": (
        new_recipe(WINDOW | {"branching": Comb(children=2)}, credit=Branch()),
        [1, 1],
    ),
    "nothing": (new_recipe(WINDOW), [4, 4]),
}
"""Recipes, and the states of a prompt that the two trained steps leave."""


def gradient(recipe, learner, batch, size: int, *, sharing: bool) -> Tensor:
    learner.optimizer.zero_grad()
    for one in minibatches(batch, torch.arange(len(batch.mask)), size):
        one = one if sharing else one.without("state")
        loss, _ = recipe.algorithm.loss(batch.fields(learner.policy, learner.reference), one)
        (loss * one.num_rows).backward()
    return torch.cat([p.grad.flatten() for p in learner.parameters])


def test_the_first_of_each_number_is_found():
    first, row = first_of_each(torch.tensor([7, 3, 7, 9, 3]))
    assert first.tolist() == [1, 0, 3]
    assert row.tolist() == [1, 0, 1, 2, 0]


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("name", SHARED)
def test_sharing_leaves_the_gradient_as_it_is(name, size):
    recipe, learner = SHARED[name][0], new_learner(moving_policy())
    batch = judged(recipe, learner)[0]
    alone = gradient(recipe, learner, batch, size, sharing=False)
    assert alone.abs().max() > 1e-3
    torch.testing.assert_close(
        gradient(recipe, learner, batch, size, sharing=True), alone, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("name", SHARED)
def test_a_state_is_evaluated_once_however_small_the_micro_batches_are(name, size):
    recipe, states = SHARED[name]
    recipe = replace(recipe, micro_batch=size)
    learner, costs = new_learner(moving_policy()), Costs()
    batch = judged(recipe, learner)[0]
    costs.count(learner.policy.denoiser)
    update(recipe, learner, batch, 0, 0)
    assert costs.training_evaluations == 3 * sum(states)
    assert evaluations(recipe, [0, 1])["training"] == sum(states)


@pytest.mark.parametrize("name", SHARED)
def test_micro_batches_change_no_update(name):
    moved = []
    for size in (1, 100):
        recipe = replace(SHARED[name][0], micro_batch=size)
        learner = new_learner(moving_policy())
        update(recipe, learner, judged(recipe, learner)[0], 0, 0)
        moved.append(flat(learner.policy.denoiser))
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(moved[0], flat(moving_policy().denoiser))


def test_samples_of_several_updates_are_planned_as_if_they_shared_nothing():
    recipe = replace(SHARED["one noise"][0], updates_per_step=2)
    assert evaluations(recipe, [0, 1])["training"] == 8


# Updates that use the graphs of their rollout have the bits of updates that evaluate again --------


KL = GRPO(PPOClip(0.2), kl_coef=0.1)
RECIPES = {
    "chains": new_recipe(WINDOW),
    "with a KL": new_recipe(WINDOW, algorithm=KL),
    "chunks": new_recipe(WINDOW, algorithm=GRPO(PPOClip(0.2), chunk_sizes=[2, 2])),
    "one noise": new_recipe(WINDOW | {"seeds_per_prompt": 1}),
    "a tree": new_recipe(WINDOW | {"branching": Tree()}, credit=Branch()),
    "a comb": new_recipe(WINDOW | {"branching": Comb(children=2)}, credit=Branch()),
}


def sized(recipe, size, **changes):
    sampling = replace(recipe.sampling, micro_batch=size)
    return replace(recipe, sampling=sampling, micro_batch=size, **changes)


def trained(recipe, steps=2):
    """Parameters after some steps, and the metrics of the steps."""
    learner = new_learner(moving_policy())
    metrics = train(recipe, learner, steps=steps)
    return flat(learner.policy.denoiser), [
        {name: one for name, one in step.items() if not name.startswith(("timing", "throughput"))}
        for step in metrics
    ]


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.parametrize("name", ["chains", "with a KL", "chunks"])
def test_an_update_with_kept_graphs_has_the_same_bits(name, size):
    recipe = sized(RECIPES[name], size)
    expected, replayed = trained(recipe)
    found, kept = trained(replace(recipe, keep_graphs=True))
    assert torch.equal(found, expected)
    assert kept == replayed
    assert not torch.equal(found, flat(moving_policy().denoiser))


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("name", ["one noise", "a tree", "a comb"])
def test_shared_states_keep_one_graph(name, size):
    """Rows of calls with states that are not trained differ, and so does rounding."""
    recipe = sized(RECIPES[name], size)
    found, _ = trained(replace(recipe, keep_graphs=True), 1)
    torch.testing.assert_close(found, trained(recipe, 1)[0], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, flat(moving_policy().denoiser))


def context(**changes):
    return RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1, **changes)


@pytest.mark.parametrize("name", RECIPES)
def test_trained_states_are_evaluated_once_and_their_graphs_are_freed(name):
    recipe = sized(replace(RECIPES[name], keep_graphs=True), 100)
    learner, costs = new_learner(moving_policy()), Costs()
    loop = PolicyGradientLoop(
        recipe, learner, new_rewards(), Requests(plain_requests(PROMPTS), 3), 0
    )
    made = loop.data(range(2))
    loop.train(0, next(made).data)  # and the checks of the first step
    costs.count(learner.policy.denoiser)
    batch = next(made).data
    assert batch.trajectory.graphs.keys() == {0, 1}
    loop.train(1, batch)
    assert not batch.trajectory.graphs
    planned = evaluations(recipe, [0, 1])
    assert costs.training_evaluations == 3 * planned["training"]
    assert costs.sampling_evaluations == 3 * planned["sampling"]  # the reference is a copy
    replayed = evaluations(replace(recipe, keep_graphs=False), [0, 1])
    assert planned["sampling"] + planned["training"] == replayed["sampling"]


def test_masked_transitions_leave_their_graphs_unread():
    """The gradient is that of the other transitions of their calls."""
    updates = []
    for keep in (False, True):
        recipe = sized(new_recipe(WINDOW, {"extremes": 1}, keep_graphs=keep), 5)
        updates.append(trained(recipe)[0])
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(updates[0], flat(moving_policy().denoiser))


class Placed:
    def __init__(self, **setup):
        self.setup = Setup(**setup)


REFUSED = {
    "updates_per_step": ({"updates_per_step": 2}, {}),
    "epochs_per_step must be 1": ({"epochs_per_step": 2}, {}),
    "micro_batch must equal": ({"micro_batch": 7}, {}),
    "rollout_batch_prompts": ({"rollout_batch_prompts": 1}, {}),
    "algorithm must": ({"algorithm": StepDPO()}, {}),
    "step_weight": ({"step_weight": MeasuredWeight()}, {}),
    "credit must": ({"credit": Gain()}, {}),
    "reference must": ({"algorithm": KL, "reference": ResetReference()}, {}),
    "sharding must": ({}, {"sharding": Sharding(weights="blocks")}),
    "context_degree 1": ({}, {"sharding": Sharding(context_degree=2)}),
    "offload must": ({}, {"offload": "layers"}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_change_a_call_is_refused_in_one_sentence(reason, tmp_path):
    changes, setup = REFUSED[reason]
    recipe, run = sized(new_recipe(WINDOW, keep_graphs=True), 8), context()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a")
    plain = as_recipe(recipe, prompts)
    plain.check(run)
    run.policy.network = Placed(**setup)
    with pytest.raises(ValueError, match=r"^recipe\.keep_graphs .*" + reason) as refusal:
        replace(plain, **changes).check(run)
    assert "\n" not in str(refusal.value)


EQUAL = "recipe.sampling.micro_batch=8", "recipe.micro_batch=8", "recipe.updates_per_step=1"
SHAPES = [
    "device=cpu",
    "evaluation=null",
    "ema=null",
    "recipe.prompts_per_step=2",
    "recipe.sampling.samples_per_prompt=4",
]


def test_the_plan_shows_the_memory_of_graphs_and_offers_it():
    model = ["configs/models/sd35_medium.yaml"]
    offered = plan(load(model, ["trackers=[]", *EQUAL])[0])["evaluations of the rollout"]
    assert offered.endswith("more: recipe.keep_graphs: true")
    kept = plan(load(model, ["trackers=[]", *EQUAL, "recipe.keep_graphs=true"])[0])
    assert "evaluations of the rollout" not in kept
    assert "blocks that recompute" not in kept
    assert kept["memory of kept graphs"]


@pytest.mark.slow
def test_a_run_of_shapes_with_kept_graphs_has_the_same_bits():
    weights = []
    for keep in ("false", "true"):
        run, _ = load("configs/shapes.yaml", [*SHAPES, f"recipe.keep_graphs={keep}"])
        with start_temporarily(run) as session:
            metrics = [*session.loop.run(range(2))]
            weights.append([p.detach().clone() for p in session.learner.parameters])
        assert all(one["optim/grad_norm"] > 0 for one in metrics)
    assert all(map(torch.equal, *weights))

"""Transitions that leave one state are evaluated together: once, with the same gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowalign.credit import Branch
from flowalign.sampling import Comb, Fixed, Tree
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.policy_gradient_loop import update
from flowalign.training.policy_gradient.step_plan import evaluations
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.types import plain_requests
from flowalign.types.losses import first_of_each
from flowalign.utils.costs import Costs
from tests.fixtures.credited import credited
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import flat, new_learner, new_recipe, new_rewards

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


def moving_policy() -> PixelPolicy:
    policy = PixelPolicy()
    torch.nn.init.normal_(policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(3))
    return policy


def batch_of(recipe, learner):
    trajectory = rollout(recipe.rollouts, learner, plain_requests(["a", "bb", "ccc"]), 0, 0)
    values = completion_values(recipe.rollouts, learner, new_rewards(), trajectory)
    return credited(recipe, learner, values)[0]


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


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("name", SHARED)
def test_sharing_leaves_the_gradient_as_it_is(name, size):
    recipe, learner = SHARED[name][0], new_learner(moving_policy())
    batch = batch_of(recipe, learner)
    alone = gradient(recipe, learner, batch, size, sharing=False)
    assert alone.abs().max() > 1e-3
    torch.testing.assert_close(
        gradient(recipe, learner, batch, size, sharing=True), alone, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("name", SHARED)
def test_a_state_is_evaluated_once_however_small_the_micro_batches_are(name, size):
    recipe, states = SHARED[name]
    recipe = replace(recipe, micro_batch=size)
    learner, costs = new_learner(moving_policy()), Costs()
    batch = batch_of(recipe, learner)
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
        update(recipe, learner, batch_of(recipe, learner), 0, 0)
        moved.append(flat(learner.policy.denoiser))
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(moved[0], flat(moving_policy().denoiser))


def test_samples_of_several_updates_are_planned_as_if_they_shared_nothing():
    recipe = replace(SHARED["one noise"][0], updates_per_step=2)
    assert evaluations(recipe, [0, 1])["training"] == 8

"""DDRL: GRPO with a loss on stored data, and advantages -exp(-A)."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.advantage import exponential_advantages
from flowalign.losses import SFT
from flowalign.training.matching import SamplerGrid, StoredDataset
from flowalign.training.matching.regulariser import Regulariser
from flowalign.training.recipe import RunContext
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import painted
from tests.fixtures.training import as_recipe, new_learner, new_recipe, new_rewards


@pytest.fixture
def stored(tmp_path):
    data = StoredDataset(path=painted(tmp_path), batch_size=4)
    times = SamplerGrid(num_steps=4)
    return Regulariser(data=data, weight=0.3, times=times, loss=SFT(on="all"))


def gradients(tmp_path, regulariser=None, steps=1, **changes):
    """Gradients of each update, and the metrics of the last one."""
    (tmp_path / "prompts.txt").write_text("a\nbb\nccc")
    policy = PixelPolicy(seed=1)
    with torch.no_grad():
        policy.denoiser[-1].weight.normal_(generator=torch.Generator().manual_seed(3))
    learner, found = new_learner(policy), []

    def keep():
        found.append(torch.cat([p.grad.flatten() for p in learner.parameters]))
        learner.optimizer.zero_grad(set_to_none=True)
        return {}

    learner.step = keep
    recipe = as_recipe(new_recipe(regulariser=regulariser, **changes), tmp_path / "prompts.txt")
    run = RunContext(policy=policy, rewards=new_rewards(), num_steps=1, seed=3)
    recipe.check(run)
    loop = recipe.open(run, learner, tmp_path, lambda _: None)
    metrics = list(loop.run(range(steps)))
    return found, metrics[-1]


def test_negative_exponentials_by_hand():
    """The values of the sheet; a group without a signal and untrained transitions stay 0."""
    advantage = tensor([[-2.0], [0.0], [2.0], [0.0], [0.0], [9.0]])
    group, mask = tensor([[0], [0], [0], [1], [1], [2]]), tensor([[True]] * 5 + [[False]])
    found = exponential_advantages(advantage, group, mask)
    assert_close(found[:, 0], tensor([-7.389056, -1.0, -0.135335, 0.0, 0.0, 0.0]))


def test_advantages_are_clipped_after_the_exponential(tmp_path):
    _, shaped = gradients(tmp_path, advantages={"exponential": True, "clip": 0.5})
    assert shaped["adv_abs_mean"] <= 0.5
    with pytest.raises(ValueError, match="set diversity to false"):
        AdvantageConfig(exponential=True, diversity=True)


def test_the_gradient_is_the_sum_of_both_losses(tmp_path, stored):
    (plain,), _ = gradients(tmp_path)
    (both,), metrics = gradients(tmp_path, stored)
    # Without an advantage, only the loss on data is left, which is fine-tuning.
    flat = {"advantages": {"std_floor": 1e3}}
    (data,), _ = gradients(tmp_path, stored, **flat)
    assert_close(both, plain + data)
    assert metrics["regulariser"] > 0
    assert min(plain.abs().max(), data.abs().max()) > 1e-4


def test_every_update_takes_other_data(tmp_path, stored):
    flat = {"advantages": {"std_floor": 1e3}, "updates_per_step": 2}
    found, _ = gradients(tmp_path, stored, steps=2, **flat)
    assert len({float(each.sum()) for each in found}) == 4


def test_the_plan_counts_the_data(tmp_path, stored):
    (tmp_path / "prompts.txt").write_text("a\nbb\nccc")
    policy = PixelPolicy()
    run = RunContext(policy=policy, rewards=new_rewards(), num_steps=1)
    plain, both = (
        as_recipe(new_recipe(updates_per_step=2, regulariser=one), tmp_path / "prompts.txt").plan(
            run, policy.plan(), 1
        )
        for one in (None, stored)
    )
    more = {"training on stored media": 16}
    assert both.work == plain.work.plus(more)
    assert len(both.parts) > len(plain.parts)

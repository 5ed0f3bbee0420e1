"""FDFO: pairs of noisy trajectories, their directions, and the loss of their velocities."""

from math import acos, pi

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.transition import CPS
from flowalign.losses.matching.fdfo import FDFO, pair_contrast, simple_policy_loss
from flowalign.sampling.sde_windows import AllButLast
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.reference_models import Average
from flowalign.training.matching.source import StreamContext
from flowalign.training.matching.state_source import VisitedStates
from flowalign.training.matching.times import SamplerGrid
from flowalign.training.recipe import RunContext
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import train
from tests.fixtures.scored import batch_of, groups, opened
from tests.fixtures.training import new_learner, new_rewards


def test_directions_and_loss_by_hand():
    """d = (1, 0), mean d^2 = .5, u = (2, 0); rho = exp(2 - 4.5) for the change (1, 0)."""
    clean = tensor([[1.5, 0.0], [-0.5, 0.0]])
    direction = pair_contrast(clean)
    assert_close(direction, tensor([[2.0, 0.0], [-2.0, 0.0]]), rtol=1e-5, atol=1e-5)
    change = tensor([[1.0, 0.0]])
    ratio = tensor([2.0 - 4.5]).exp()
    got = simple_policy_loss(change, tensor([[2.0, 0.0]]), tensor([0.5]), 0.1)
    assert_close(got, -0.5 * ratio + 0.5 / 0.2 * (ratio - 1) ** 2)


def test_the_first_gradient_follows_the_direction_and_both_branches_agree():
    """2 g u / D, the same for both rows, because both signs are flipped."""
    clean = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction, gain = pair_contrast(clean), tensor([0.7, -0.7], dtype=torch.float64)
    change = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    loss = simple_policy_loss(change, direction, gain, 0.03).sum()
    (slope,) = torch.autograd.grad(loss, change)
    assert_close(slope, 2 * gain[:, None] * direction / 6)
    assert_close(slope[0], slope[1])
    change = 0.1 * clean.clone().requires_grad_()
    same = simple_policy_loss(change, direction, torch.zeros(2, dtype=torch.float64), 0.03).sum()
    assert torch.autograd.grad(same, change)[0].abs().max() == 0


def test_directions_times_gains_are_the_gradient_of_a_linear_reward():
    slope = tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    clean = 0.1 * torch.randn(200_000, 4, generator=draw, dtype=torch.float64)
    gain = (clean @ slope).unflatten(0, (-1, 2))
    gain = (gain - gain.mean(1, keepdim=True)).flatten()
    assert_close((gain[:, None] * pair_contrast(clean)).mean(0), slope, atol=0.02, rtol=0.0)


def test_a_churned_step_is_a_step_of_cps():
    """The published churn: Euler to r, a scale and noise, for any step."""
    gamma, sigmas = 0.0025, tensor([0.8, 0.6, 0.0], dtype=torch.float64)
    eta = tensor([2 / pi * acos(1 / (1 + gamma))], dtype=torch.float64)
    assert float(eta) == pytest.approx(0.045, abs=5e-4)
    s = sigmas[1]
    r = s / (1 + gamma - gamma * s)
    c1, std = CPS().coefficients(sigmas, 0, eta)
    assert_close(c1, (r / (1 + gamma * r)).reshape(1))
    assert_close(std, (r * ((1 + gamma) ** 2 - 1) ** 0.5 / (1 + gamma * r)).reshape(1))


PAIRS = {"samples_per_prompt": 2, "seeds_per_prompt": 1, "sde_window": AllButLast()}
SAMPLER = PAIRS | {"eta": 0.3, "kernel": CPS()}


def data(tmp_path, **changes):
    advantages = {"scale": "none", "clip": None}
    return groups(tmp_path, SAMPLER | changes, advantages, contrast=True)


def settings(source, **changes):
    times = SamplerGrid(num_steps=4, distinct=True)
    own = {"loss": FDFO(), "times": times, "states": VisitedStates(), "old": Average()}
    return Matching(data=source, times_per_sample=4, **own | changes)


def test_all_visited_states_of_both_samples_are_matched(tmp_path):
    learner = new_learner(PixelPolicy(seed=1))
    batch = batch_of(opened(data(tmp_path), learner))
    visited, examples = batch.visited, batch.examples
    start = visited.state(0)
    assert torch.equal(start[0::2], start[1::2])
    assert not torch.equal(visited.state(1)[0::2], visited.state(1)[1::2])
    assert_close(examples["advantage"][0::2], -examples["advantage"][1::2])
    assert_close(examples["contrast"], pair_contrast(visited.state(4)))
    cfg = settings(data(tmp_path))
    part = noise_for(cfg, learner.policy, examples, 0, (0, 0, 0), visited=visited).all()
    matched = cfg.states.build(part, learner.policy, None)
    step = ((1 - matched["sigma"]) * 4).round().int()
    wanted = torch.stack([visited.state(int(k))[i // 4] for i, k in enumerate(step)])
    assert_close(matched["x"], wanted, atol=1e-5, rtol=1e-5)
    assert sorted(step.tolist()) == sorted([0, 1, 2, 3] * 6)


def test_training_raises_the_reward(tmp_path):
    learner = new_learner(PixelPolicy(seed=1), learning_rate=0.02)
    source = data(tmp_path)
    cfg = settings(source)
    cfg.check(RunContext(policy=learner.policy, rewards=new_rewards(), num_steps=1))
    cfg.old.follow(learner, "old")
    stream = source.open(learner, StreamContext(new_rewards(), 0))
    history = train(cfg, learner, stream, 25)
    rewards = [row["reward_mean"] for row in history]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.1


def test_groups_that_are_no_pairs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"samples_per_prompt to 2, seeds_per_prompt to 1"):
        data(tmp_path, samples_per_prompt=4)
    with pytest.raises(ValueError, match=r"set sampling.tail_ratio to null"):
        data(tmp_path, tail_ratio=0.5)

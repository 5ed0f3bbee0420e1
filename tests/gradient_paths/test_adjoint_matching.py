"""Adjoint matching in the loop: its gradient, its steps, and what it refuses."""

import pytest
import torch

from flowalign.data.requests import Requests
from flowalign.functional.transition import transition
from flowalign.gradient_paths import AdjointMatching, DRaFT
from flowalign.gradient_paths.adjoint_matching import draw_steps
from flowalign.losses import Maximise
from flowalign.rewards.composite import Rewards
from flowalign.training.engine import Statistics, accumulate
from flowalign.training.reward_gradient import FromNoisyRollouts, FromRollouts, RewardGradient
from flowalign.training.reward_gradient.reward_gradient_recipe import RewardGradientLoop
from flowalign.types import plain_requests
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy, SmoothRedness
from tests.fixtures.training import PROMPTS, new_learner

T, SEED = 4, 5


def recipe(**changes):
    own = {"prompts_per_step": 3, "micro_batch": 2, "start": FromNoisyRollouts(num_steps=T)}
    path = AdjointMatching(reward_scale=2.0, trained_steps=2)
    return RewardGradient(prompts="", **{"gradient_path": path, "loss": Maximise()} | own | changes)


def opened(cfg):
    """A loop with a policy that has moved away from its initial model."""
    policy = PixelPolicy(seed=3)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        policy.denoiser[-1].weight.normal_(std=0.3, generator=draw)
    learner = new_learner(policy)
    learner.reference.policy.denoiser.requires_grad_(False)
    with torch.no_grad():
        policy.denoiser[-1].weight += 0.1 * torch.randn(3, 32, generator=draw)
    rewards = Rewards([SmoothRedness()], {"redness": 1.5}).weighted()
    requests = Requests(plain_requests(PROMPTS), 3)
    return learner, RewardGradientLoop(cfg, learner, rewards, requests, SEED)


def test_the_gradient_is_that_of_the_error_of_the_control():
    """By autograd through single steps of the initial model, for all rows together."""
    cfg = recipe()
    learner, loop = opened(cfg)
    trajectory, statistics = loop.sample(0).trajectory, Statistics(learner.processes)
    accumulate(learner, loop.term(0, loop.sample(0), statistics), statistics)
    metrics = loop.metrics(statistics)
    found = torch.cat([p.grad.flatten() for p in learner.parameters])
    policy, base, cond = learner.policy, learner.reference.policy, trajectory.cond
    trained = draw_steps(T - 1, 2, generator(SEED, "connection", 0))

    def step(field, x, k):
        v = field.velocity(x, trajectory.sigmas[k], cond)
        return transition(trajectory.kernel, x, v, trajectory.sigmas, k, trajectory.eta[:, k])

    leaf = trajectory.state(T).requires_grad_()
    media = policy.decode(leaf)[:, 0, :, 0, 0]
    (adjoint,) = torch.autograd.grad(-2.0 * 1.5 * (media[:, 0] - media[:, 2]).sum(), leaf)
    loss = torch.zeros(())
    for k in reversed(range(T)):
        leaf = trajectory.state(k).requires_grad_()
        end = step(base, leaf, k)
        if k in trained:
            std = end.std[:, None]
            control = (step(policy, leaf.detach(), k).mean - end.mean.detach()) / std
            loss = loss + (control + std * adjoint).square().mean() / 2
        (adjoint,) = torch.autograd.grad(end.mean, leaf, adjoint)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, learner.parameters)])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert metrics["matched_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found.abs().max() > 1e-3


def test_half_of_the_steps_are_early():
    draws = [draw_steps(10, 4, torch.Generator().manual_seed(i)) for i in range(20)]
    assert all(len({*one}) == 4 and one == sorted(one) for one in draws)
    assert {sum(k < 6 for k in one) for one in draws} == {2}
    assert {k for one in draws for k in one} == {*range(10)}
    assert draw_steps(3, 3, torch.Generator()) == [0, 1, 2]


def test_the_cost_is_that_of_the_adjoint():
    """Steps before the first trained one need no pull-back; one step is in memory at a time."""
    cost = recipe().cost
    assert (cost.replayed, cost.elsewhere, cost.together, cost.views) == (2, 0, 1, 1)
    assert 3 <= cost.pulled_back <= 4


REFUSED = {
    "rollouts without noise": ({"start": FromRollouts(num_steps=T)}, "go together"),
    "noise for another path": ({"gradient_path": DRaFT()}, "go together"),
    "a second KL": ({"kl": 1.0}, "follows from reward_scale"),
    "too few steps": ({"start": FromNoisyRollouts(num_steps=2)}, "give at most 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        recipe(**changes)

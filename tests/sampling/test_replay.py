"""Steps of cached rollouts are evaluated again as they were made, with a gradient."""

import pytest
import torch

from flowalign.sampling.rollout_replay import CachedReplay
from flowalign.training.reference import unguided
from flowalign.training.reward_gradient import FromRollouts
from flowalign.types import plain_requests
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy

PROMPTS = ["a", "bbb", "cc"]


class GuidedPixel(PixelPolicy):
    """A pixel with classifier-free guidance; evaluations are counted by condition."""

    def __init__(self, guidance=3.5):
        super().__init__(seed=4)
        torch.nn.init.normal_(self.denoiser[-1].weight, std=0.3)
        self.guidance, self.evaluations_per_velocity = guidance, 2
        self.seen = []

    def velocity(self, x, sigma, cond):
        self.seen.append((len(x), torch.is_grad_enabled(), self.guidance > 1))
        v = super().velocity(x, sigma, cond)
        if self.guidance <= 1:
            return v
        v_neg = super().velocity(x, sigma, {"length": 0 * cond["length"]})
        return v_neg + self.guidance * (v - v_neg)


def rolled(policy, num_steps=5, samples=2):
    start = FromRollouts(num_steps=num_steps, samples_per_prompt=samples)
    seeds = [generator(0, "noise", i) for i in range(len(PROMPTS))]
    return start.trajectory(policy, plain_requests(PROMPTS), seeds)


def replay_of(policy, trajectory, samples=range(6), conditional=None):
    rows = torch.tensor(list(samples))
    keys = [(7, 0, int(i)) for i in rows]
    return CachedReplay(policy, trajectory, rows, keys, conditional)


def test_a_replayed_velocity_is_the_one_that_made_the_step():
    policy = GuidedPixel()
    trajectory = rolled(policy)
    whole, part = replay_of(policy, trajectory), replay_of(policy, trajectory, [4, 1])
    for k in range(5):
        v = whole.velocity(k)
        assert v.requires_grad
        torch.testing.assert_close(v.detach(), whole.cached_velocity(k), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.velocity(k), v[[4, 1]])
    assert [len(e.x) for e in whole.evaluated] == [6] * 5


@pytest.mark.parametrize("where", ["at a state", "elsewhere"])
def test_a_detached_unconditional_branch_keeps_the_value_and_costs_one_evaluation(where):
    policy = GuidedPixel()
    trajectory = rolled(policy)
    parameters, k = list(policy.denoiser.parameters()), 2
    plain, replay = unguided(policy), replay_of(policy, trajectory)
    detached = replay_of(policy, trajectory, conditional=plain)
    policy.seen.clear()

    def evaluated(replay):
        x = replay.state(k) + (0.1 if where == "elsewhere" else 0.0)
        return replay.velocity_at(x, replay.sigmas[k]) if "else" in where else replay.velocity(k)

    found = evaluated(detached)
    cheap = [(6, True, False)]
    assert policy.seen == (cheap if where == "at a state" else [(6, False, True), *cheap])
    torch.testing.assert_close(found, evaluated(replay), atol=1e-5, rtol=1e-5)

    x = replay.state(k) + (0.1 if where == "elsewhere" else 0.0)
    alone = policy.guidance * plain.velocity(x, replay.sigmas[k], replay.cond)
    weight = torch.linspace(-1, 1, found.numel()).view_as(found)
    ours, theirs = (torch.autograd.grad((weight * v).sum(), parameters) for v in (found, alone))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_noise_belongs_to_the_sample_and_not_to_its_micro_batch():
    policy = PixelPolicy()
    trajectory = rolled(policy)
    whole, part = replay_of(policy, trajectory), replay_of(policy, trajectory, [5, 2])
    torch.testing.assert_close(part.noise(1), whole.noise(1)[[5, 2]], rtol=0, atol=0)
    assert (whole.noise(0) - whole.noise(1)).abs().min() > 0
    assert len(whole.noise(0).unique()) == 18


def test_rollouts_from_pure_noise_know_it():
    policy = PixelPolicy()
    trajectory = rolled(policy)
    replay = replay_of(policy, trajectory)
    assert torch.equal(replay.initial_noise(), trajectory.state(0))
    trajectory.sigmas[0] = 0.95  # as of models that were never trained on pure noise
    assert torch.equal(replay_of(policy, trajectory).initial_noise(), replay.noise(-1))


def test_a_state_that_was_not_kept_is_named():
    policy = PixelPolicy()
    trajectory = rolled(policy)
    del trajectory.states[3]
    with pytest.raises(ValueError, match="state 3 was not kept"):
        replay_of(policy, trajectory).velocity(3)

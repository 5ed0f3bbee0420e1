"""Guidance by a latent reward: pushes by hand, plain sampling at scale 0, unguided densities."""

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.transition import DanceSDE, FlowSDE, log_density, transition
from flowalign.sampling import Fixed, FrameWindow, Sampling, Tree, generate, sample
from flowalign.sampling.reward_guidance import (
    Euphonium,
    FlowNRG,
    GuidedTransition,
    compute_gradient,
)
from flowalign.types import plain_requests
from flowalign.utils.seeds import generator
from tests.fixtures.latent import LatentRedness
from tests.fixtures.pixel import PixelPolicy

PROMPTS = ("a", "bbb")
WEIGHTS = {"redness": 2.0}


def nrg(scale=0.7):
    return FlowNRG(reward=LatentRedness(), weights=WEIGHTS, scale=scale)


def euphonium(**changes):
    given = {"start": 2, "scale": 3.0} | changes
    return Euphonium(reward=LatentRedness(), weights=WEIGHTS, **given)


def moved():
    policy = PixelPolicy(seed=4)
    torch.nn.init.normal_(policy.denoiser[-1].weight, std=0.3)
    return policy


def drawn(guidance, kernel=None, **changes):
    kernel = kernel or FlowSDE()
    given = {"num_steps": 4, "samples_per_prompt": 4, "sde_window": Fixed(0, 3), "kernel": kernel}
    cfg = Sampling(**given | {"reward_guidance": guidance} | changes)
    window = cfg.sde_window.steps(4, 0, torch.Generator())
    seeds = [generator(5, "noise", i) for i in range(2)]
    return sample(moved(), plain_requests(PROMPTS), cfg, window, seeds)


def sampled(guidance, micro_batch=64):
    seeds = [generator(5, "noise", i) for i in range(2)]
    return generate(moved(), plain_requests(PROMPTS), 4, seeds, micro_batch, guidance)


def test_generating_with_flow_nrg_by_hand():
    policy, guidance = moved(), nrg()
    x = torch.cat([policy.noise(1, generator(5, "noise", i)) for i in range(2)])
    cond, sigmas = policy.encode(plain_requests(PROMPTS)), policy.schedule(4)
    for k in range(4):
        sigma, v = float(sigmas[k]), policy.velocity(x, sigmas[k], cond)
        if k:  # pure noise is left alone
            gradient = 2 * guidance.reward.gradient(x, sigma, cond["length"][:, 0])
            v = v - 0.7 * sigma / (1 - sigma) * gradient
        x = x - 0.25 * v
    assert_close(sampled(guidance), x.detach())
    assert [level for level, _ in guidance.reward.scored] == [0.75, 0.5, 0.25]


@pytest.mark.parametrize("none", [nrg(0.0), euphonium(scale=0.0)], ids=["nrg", "euphonium"])
def test_scale_0_is_plain_sampling_to_the_bit_and_scores_nothing(none):
    assert torch.equal(sampled(none), sampled(None))
    for k in range(5):
        assert torch.equal(drawn(none).state(k), drawn(None).state(k))
    assert none.reward.scored == []


def test_the_gradient_equals_finite_differences():
    guidance = nrg()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3)).double()
    cond, sigma = {"length": torch.tensor([[1.0], [3.0]]).double()}, torch.tensor(0.4).double()
    found = compute_gradient(guidance, x, sigma, cond)
    for place in range(3):
        step = torch.zeros(3).double()
        step[place] = 1e-5
        ahead, behind = (guidance.reward.score(x + s, sigma, cond)[:, 0] for s in (step, -step))
        assert_close(found[:, place], 2 * (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kernel", [FlowSDE(), DanceSDE()], ids=["flow", "dance"])
def test_log_probabilities_of_pushed_rollouts_are_those_without_guidance(kernel):
    pushed, policy = drawn(euphonium(), kernel), moved()
    cond = {"length": torch.tensor([[1.0]] * 4 + [[3.0]] * 4)}
    for k in range(3):
        v = policy.velocity(pushed.state(k), pushed.sigmas[k], cond)
        plain = transition(kernel, pushed.state(k), v, pushed.sigmas, k, pushed.eta[:, k])
        assert_close(pushed.logp[:, k], log_density(kernel, pushed.state(k + 1), plain).detach())


def test_only_the_steps_from_the_start_on_are_pushed_and_by_scale_dt_gradient():
    guidance = euphonium()
    pushed, plain = drawn(guidance), drawn(None)
    assert torch.equal(pushed.state(2), plain.state(2))
    length = torch.tensor([1.0] * 4 + [3.0] * 4)
    gradient = 2 * guidance.reward.gradient(plain.state(2), 0.5, length)
    assert_close(pushed.state(3) - plain.state(3), 3.0 * 0.25 * gradient)
    assert [level for level, _ in guidance.reward.scored] == [0.5, 0.25]


def test_the_two_forms_of_euphonium_agree_at_the_published_values():
    step = GuidedTransition(torch.linspace(1, 0, 17), 13, DanceSDE(), torch.full((2,), 0.25))
    gradient = torch.tensor([[1.0, -2.0, 3.0], [0.0, 4.0, -5.0]])
    released = euphonium(scale=0.01).push(gradient, step)
    assert_close(released, euphonium(form="paper").push(gradient, step))
    twice = GuidedTransition(step.sigmas, 13, step.kernel, torch.full((2,), 0.5))
    assert_close(euphonium(scale=0.01).push(gradient, twice), released)
    assert_close(euphonium(form="paper").push(gradient, twice), 4 * released)


def test_samples_that_share_a_state_are_pushed_alike_by_one_gradient():
    guidance = euphonium(start=0)
    pushed = drawn(guidance, branching=Tree(splits=(1, 2)))
    assert torch.equal(pushed.state(1)[0], pushed.state(1)[3])
    assert [rows for _, rows in guidance.reward.scored] == [2, 2, 4, 8]


def test_the_micro_batch_changes_no_push():
    assert_close(sampled(nrg(), micro_batch=1), sampled(nrg()))


def test_weights_of_unknown_dimensions_are_refused():
    for weights in ({"blue": 1.0}, {}, {"green": 0.0}):
        with pytest.raises(ValueError, match=r"latent reward has redness, green"):
            FlowNRG(reward=LatentRedness(), weights=weights, scale=1.0)


def test_guidance_of_frames_that_samples_share_and_of_second_order_steps_is_refused():
    with pytest.raises(ValueError, match="frame_window is FrameWindow, but reward_guidance"):
        Sampling(reward_guidance=nrg(), frame_window=FrameWindow(length=1))
    with pytest.raises(ValueError, match=r"tail_ratio is 0\.5, but reward_guidance FlowNRG pushes"):
        Sampling(reward_guidance=nrg(), tail_ratio=0.5)

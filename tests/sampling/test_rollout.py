"""Sampling: rollouts can be replayed exactly, and depend only on their own prompt."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.transition import (
    CPS,
    DDIM,
    DanceSDE,
    FlowSDE,
    Precise,
    log_density,
    transition,
)
from flowalign.losses.policy_gradient.grpo import GRPO, PPOClip
from flowalign.sampling import AllButLast, Fixed, Sampling, Tree, generate
from flowalign.sampling.rollout import RolloutOutputs, sample
from flowalign.sampling.sampling_settings import Storage
from flowalign.sampling.stepping import complete, evaluate_velocity
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.rollouts.collecting import rollout
from flowalign.types import plain_requests
from flowalign.types.trajectory import Completion, take_rows
from flowalign.utils.costs import Costs
from flowalign.utils.seeds import generator
from tests.fixtures.credited import judged
from tests.fixtures.embedded import move, new_sd3
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import PROMPTS, new_learner, new_recipe, new_rewards, train

KERNELS = [FlowSDE(), DanceSDE(), CPS(), CPS("gaussian"), Precise(), DDIM()]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
THREE = ["a", "ccc", "bb"]
ROWS = torch.arange(12) // 4
"""The prompt of each sample, of three prompts with four samples."""


def seeds(count, purpose="noise"):
    return [generator(7, purpose, i) for i in range(count)]


def pixel_policy():
    """Away from its start, where the velocity is x plus a constant and input mistakes hide."""
    policy = PixelPolicy(seed=3)
    torch.nn.init.normal_(policy.denoiser[-1].weight, std=0.3)
    return policy


@pytest.fixture(scope="module")
def sd3():
    policy = new_sd3()
    move(policy, 0.02)
    return policy


def draw(policy, cfg, steps=None, prompts=THREE, keep_means=False):
    steps = cfg.sde_window.steps(cfg.num_steps, 0, torch.Generator()) if steps is None else steps
    keep = RolloutOutputs(means=keep_means)
    return sample(policy, plain_requests(prompts), cfg, steps, seeds(len(prompts)), keep=keep)


def stacked(trajectory, count=None):
    """The first states of every sample, all where no count is given."""
    ks = range(trajectory.num_steps + 1 if count is None else count)
    return torch.stack([trajectory.state(k) for k in ks], 1)


def replayed(policy, trajectory, kernel, k, micro_batch):
    """log-densities of step k from stored states only, through the same chunks."""
    x, x_next = trajectory.state(k), trajectory.state(k + 1)
    rows = torch.arange(len(x)) // trajectory.group_size
    with torch.no_grad():
        v = evaluate_velocity(policy, x, trajectory.sigmas[k], trajectory.cond, rows, micro_batch)
    current = transition(kernel, x, v, trajectory.sigmas, k, trajectory.eta[:, k])
    return log_density(kernel, x_next, current)


def replays():
    """Every kernel in every precision on pixels; with a network, each of them at least once."""
    for i, kernel in enumerate(KERNELS):
        for k, dtype in enumerate(DTYPES):
            name = f"{type(kernel).__name__}-{kernel.density}-{dtype}"
            yield pytest.param("pixel", kernel, dtype, id=f"pixel-{name}")
            if i % len(DTYPES) == k:
                yield pytest.param("embedded", kernel, dtype, id=f"embedded-{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("which", "kernel", "dtype"), replays())
def test_replay_reproduces_every_stored_log_probability_exactly(which, kernel, dtype, request):
    policy = pixel_policy() if which == "pixel" else request.getfixturevalue("sd3")
    cfg = Sampling(
        num_steps=4,
        samples_per_prompt=3,
        kernel=kernel,
        states=Storage(dtype=dtype),
        eta=0.6,
        micro_batch=5,
    )
    trajectory = draw(policy, cfg)
    assert {state.dtype for state in trajectory.states.values()} == {DTYPES[dtype]}
    assert (trajectory.logp[:, :3] != 0).all()
    for k in range(3):
        assert torch.equal(replayed(policy, trajectory, kernel, k, 5), trajectory.logp[:, k])
        other = replayed(policy, trajectory, kernel, k + 1 if k < 2 else k - 1, 5)
        assert not torch.allclose(other, trajectory.logp[:, k])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{type(k).__name__}-{k.density}")
def test_a_minibatch_holds_what_replays_its_transitions(kernel):
    """Through the loop's own `minibatches`, with chunks that differ from those of sampling."""
    learner = new_learner(pixel_policy())
    cfg = new_recipe({"kernel": kernel, "micro_batch": 5, "eta": 0.6}, algorithm=GRPO(PPOClip(0.2)))
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    rollouts, _ = judged(cfg, learner, trajectory=trajectory)
    seen = 0
    for batch in minibatches(rollouts, torch.arange(len(rollouts.mask)), 7):
        current = rollouts.fields(learner.policy, learner.policy).transition(learner.policy, batch)
        got = log_density(kernel, batch["x_next"].float(), current)
        torch.testing.assert_close(got, batch["logp_old"], atol=1e-5, rtol=1e-5)
        seen += batch.num_rows
    assert seen == 12 * 3


def test_a_merged_step_jumps_with_the_noise_of_its_whole_length():
    """Flow-SDE from .75: sqrt(.25) and sqrt(.5) of g = .6 sqrt(3) times 4.13 are 2.1 and 3.0."""
    policy = pixel_policy()
    cfg = Sampling(num_steps=4, samples_per_prompt=2000, eta=0.6, sde_window=Fixed(1, 2))
    plain = draw(policy, cfg, prompts=["a"])
    merged = draw(policy, dataclasses.replace(cfg, merge=2.5), prompts=["a"])
    assert merged.sigmas.tolist() == [1, 0.75, 0.25, 0.25, 0]
    assert draw(policy, dataclasses.replace(cfg, merge=2.0)).sigmas.tolist() == [
        1,
        0.75,
        0.5,
        0.25,
        0,
    ]
    assert torch.equal(stacked(merged, 2), stacked(plain, 2))
    torch.testing.assert_close(merged.state(2), merged.state(3), atol=1e-6, rtol=1e-6)
    rows = torch.zeros(2000, dtype=torch.long)
    with torch.no_grad():
        x, cond = merged.state(1), take_rows(merged.cond, rows)
        v = policy.velocity(x, torch.tensor(0.75), cond)
        std = 0.6 * 3**0.5 * 0.5**0.5
        x1 = x + 0.25 * v
        noise = merged.state(2) - (0.75 * (x - 0.75 * v) + (0.25 - std**2 / 1.5) * x1)
        last = merged.state(3)
        end = last - 0.25 * policy.velocity(last, torch.tensor(0.25), cond)
    assert noise.std() == pytest.approx(std, rel=0.03)
    assert abs(float(noise.mean())) < 0.05
    torch.testing.assert_close(merged.state(4), end, atol=1e-5, rtol=1e-5)


def test_merged_steps_are_learned_from():
    cfg = new_recipe({"sde_window": Fixed(1, 2), "merge": 2.5, "samples_per_prompt": 8})
    metrics = train(cfg, new_learner(learning_rate=3e-2), steps=12)
    assert metrics[-1]["reward/redness"] > metrics[0]["reward/redness"] + 0.2
    assert metrics[0]["check/ratio_drift_1"] < 1e-5


def test_kept_means_are_the_means_of_the_trained_steps_only():
    policy = pixel_policy()
    cfg = Sampling(num_steps=5, samples_per_prompt=2, sde_window=Fixed(1, 3))
    trajectory = draw(policy, cfg, keep_means=True)
    assert sorted(trajectory.means) == [1, 2]
    for k, mean in trajectory.means.items():
        noise = trajectory.state(k + 1) - mean
        assert 0.01 < noise.abs().mean() < 2
    assert draw(policy, cfg).means == {}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{type(k).__name__}-{k.density}")
def test_outside_the_window_states_follow_euler_and_have_no_log_probability(kernel):
    policy = pixel_policy()
    cfg = Sampling(
        num_steps=6, samples_per_prompt=2, kernel=kernel, eta=0.6, sde_window=Fixed(2, 4)
    )
    trajectory = draw(policy, cfg)
    rows = torch.arange(6) // 2
    inside = torch.zeros(6, dtype=torch.bool)
    inside[[2, 3]] = True
    assert ((trajectory.eta > 0) == inside).all()
    assert ((trajectory.logp != 0) == inside).all()
    for k in range(6):
        x, s, t = trajectory.state(k), trajectory.sigmas[k], trajectory.sigmas[k + 1]
        with torch.no_grad():
            euler = x + (t - s) * policy.velocity(x, s, take_rows(trajectory.cond, rows))
        away = (trajectory.state(k + 1) - euler).abs().max()
        assert (away > 0.05) == bool(inside[k]), k
        if not inside[k]:
            torch.testing.assert_close(trajectory.state(k + 1), euler, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_shared_initial_noise_is_one_state_per_prompt(shared):
    cfg = Sampling(num_steps=3, samples_per_prompt=4, seeds_per_prompt=1 if shared else None)
    states = stacked(draw(pixel_policy(), cfg)).unflatten(0, (3, 4))
    first, later = states[:, :, 0], states[:, :, 1]
    assert torch.equal(first, first[:, :1].expand_as(first)) == shared
    assert len(first.flatten(0, 1).unique(dim=0)) == (3 if shared else 12)
    assert len(later.flatten(0, 1).unique(dim=0)) == 12


@pytest.mark.parametrize("noise", [None, 1, 2])
def test_what_a_prompt_draws_does_not_depend_on_who_is_sampled_with_it(noise):
    """Three prompts at once, or one and two as on two processes, or in smaller network calls."""
    policy, group = pixel_policy(), 4
    cfg = Sampling(num_steps=4, samples_per_prompt=group, seeds_per_prompt=noise)
    together = draw(policy, cfg)
    for part in (slice(0, 1), slice(1, 3)):
        alone = sample(policy, plain_requests(THREE[part]), cfg, (0, 1, 2), seeds(3)[part])
        rows = slice(part.start * group, part.stop * group)
        torch.testing.assert_close(stacked(alone), stacked(together)[rows], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(alone.logp, together.logp[rows], atol=1e-5, rtol=1e-5)
    small = draw(policy, dataclasses.replace(cfg, micro_batch=5))
    torch.testing.assert_close(stacked(small), stacked(together), atol=1e-6, rtol=1e-6)


def test_samples_are_prompt_major_and_conditioned_on_their_own_prompt():
    policy = pixel_policy()
    cfg = Sampling(num_steps=3, samples_per_prompt=2, sde_window=AllButLast())
    trajectory = draw(policy, cfg)
    assert trajectory.prompts == ["a", "a", "ccc", "ccc", "bb", "bb"]
    assert trajectory.cond["length"].flatten().tolist() == [1, 3, 2]
    x, s, t = trajectory.state(2), trajectory.sigmas[2], trajectory.sigmas[3]
    lengths = torch.tensor([1.0, 1.0, 3.0, 3.0, 2.0, 2.0])[:, None]
    with torch.no_grad():
        last = x + (t - s) * policy.velocity(x, s, {"length": lengths})
    torch.testing.assert_close(trajectory.state(3), last)


def test_another_step_of_the_loop_draws_other_noise():
    learner, cfg = new_learner(), new_recipe()
    a, b = (
        stacked(rollout(cfg.rollouts, learner, plain_requests(THREE), 0, step)) for step in (0, 1)
    )
    assert (a[:, 0] - b[:, 0]).abs().min() > 0
    assert torch.equal(stacked(rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)), a)
    assert not torch.equal(stacked(rollout(cfg.rollouts, learner, plain_requests(THREE), 1, 0)), a)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{type(k).__name__}-{k.density}")
def test_generate_is_a_rollout_without_a_window(kernel):
    policy = pixel_policy()
    cfg = Sampling(num_steps=5, samples_per_prompt=1, kernel=kernel)
    trajectory = draw(policy, cfg, steps=())
    assert trajectory.eta.abs().max() == 0
    latents = generate(policy, plain_requests(THREE), 5, seeds(3), micro_batch=2)
    torch.testing.assert_close(latents, trajectory.state(5), atol=1e-5, rtol=1e-5)


def test_generate_orders_its_prompts_as_asked_and_repeats_what_is_repeated():
    policy = pixel_policy()
    prompts = ["ccc", "a", "ccc"]
    got = generate(policy, plain_requests(prompts), 3, seeds(3), micro_batch=64)
    alone = torch.cat(
        [
            generate(policy, plain_requests([p]), 3, [s], micro_batch=1)
            for p, s in zip(prompts, seeds(3), strict=True)
        ]
    )
    torch.testing.assert_close(got, alone, atol=1e-6, rtol=1e-6)


def test_finishing_follows_the_ode_from_any_state():
    policy = pixel_policy()
    cfg = Sampling(num_steps=4, samples_per_prompt=2)
    trajectory = draw(policy, cfg, steps=())
    how = Completion()
    for k in (0, 2):
        torch.testing.assert_close(
            complete(policy, trajectory, [(k, how)], 3)[k, how],
            trajectory.state(4),
            atol=1e-5,
            rtol=1e-5,
        )
    noisy = draw(policy, cfg)
    x, s = noisy.state(3), noisy.sigmas
    with torch.no_grad():
        v = policy.velocity(x, s[3], take_rows(noisy.cond, torch.arange(6) // 2))
    torch.testing.assert_close(
        complete(policy, noisy, [(3, how)], 3)[3, how], x + (s[4] - s[3]) * v
    )


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_network_evaluations_are_those_worked_out_by_hand(kl):
    """3 prompts x 4 samples: 12 x 5 sampled, 12 x 2 x 3 trained, and 12 x 2 x 3 for the reference.

    The checks of the first step are not counted.
    """
    cfg = new_recipe(
        {"num_steps": 5, "sde_window": Fixed(1, 3)},
        epochs_per_step=3,
        updates_per_step=2,
        micro_batch=4,
        algorithm=GRPO(PPOClip(0.2), kl_coef=kl),
    )
    costs = Costs()
    policy = PixelPolicy()
    costs.count(policy.denoiser)
    learner = new_learner(policy)
    rewards = new_rewards()
    rewards.costs = costs
    train(cfg, learner, rewards, steps=1)
    assert costs.sampling_evaluations == 12 * 5 + (12 * 2 * 3 if kl else 0)
    assert costs.training_evaluations == 12 * 2 * 3
    assert costs.network_evaluations == costs.sampling_evaluations + costs.training_evaluations
    assert (costs.decodes, costs.reward_calls) == (12, 12)


@pytest.mark.slow
def test_guidance_costs_two_evaluations_a_sample():
    costs = []
    for guidance in (1.0, 3.0):
        policy = new_sd3(guidance=guidance)
        spent = Costs()
        spent.count(policy.denoiser)
        draw(policy, Sampling(num_steps=3, samples_per_prompt=2, micro_batch=4))
        costs.append(spent.sampling_evaluations)
    assert costs == [6 * 3, 6 * 3 * 2]


def test_uncounted_work_leaves_no_trace():
    policy, costs = pixel_policy(), Costs(decodes=3)
    costs.count(policy.denoiser)
    with costs.paused():
        generate(policy, plain_requests(list(PROMPTS)), 2, seeds(5), micro_batch=2)
        costs.decodes += 9
    assert costs == Costs(decodes=3)
    generate(policy, plain_requests(list(PROMPTS)), 2, seeds(5), micro_batch=2)
    assert costs == Costs(decodes=3, sampling_evaluations=10)


def test_siblings_share_a_part_of_their_noise_and_each_alone_is_standard_normal():
    """Spread 2: correlation 1 / (1 + 4) between the two children of a split."""
    cfg = Sampling(
        num_steps=2,
        samples_per_prompt=2,
        eta=1.0,
        sde_window=Fixed(0, 1),
        branching=Tree(sibling_noise_scale=2.0),
    )
    policy = pixel_policy()
    trajectory = sample(policy, plain_requests(["a"] * 400), cfg, (0,), seeds(400))
    x = stacked(trajectory)
    v = policy.velocity(x[:, 0], trajectory.sigmas[0], {"length": torch.ones(800, 1)}).detach()
    at = transition(cfg.kernel, x[:, 0], v, trajectory.sigmas, 0, trajectory.eta[:, 0])
    both = ((x[:, 1] - at.mean) / at.std[:, None]).unflatten(0, (400, 2))
    assert both.std().item() == pytest.approx(1.0, abs=0.05)
    assert (both[:, 0] * both[:, 1]).mean().item() == pytest.approx(0.2, abs=0.07)


def noisy_steps(trajectory):
    return (trajectory.eta > 0).any(0).nonzero().flatten().tolist()


def test_untrained_steps_of_dancegrpo_are_noisy_in_every_sample_but_not_trained():
    policy = pixel_policy()
    cfg = Sampling(
        num_steps=6,
        samples_per_prompt=4,
        eta=0.3,
        kernel=DanceSDE(),
        seeds_per_prompt=1,
        untrained_steps="sde",
    )
    trajectory = draw(policy, cfg, steps=(2, 4))
    assert noisy_steps(trajectory) == [0, 1, 2, 3, 4]  # the last stays an ODE step
    assert trajectory.trained.all(0).tolist() == [False, False, True, False, True, False]
    assert (trajectory.state(0)[:4] == trajectory.state(0)[0]).all()
    assert len(trajectory.unique_states(1)) == len(trajectory.prompts)  # apart from step 0 on
    for k in range(5):
        mean = transition(
            cfg.kernel,
            trajectory.state(k),
            evaluate_velocity(
                policy, trajectory.state(k), trajectory.sigmas[k], trajectory.cond, ROWS, 64
            ),
            trajectory.sigmas,
            k,
            trajectory.eta[:, k],
        ).mean
        assert (trajectory.state(k + 1) - mean).abs().flatten(1).amax(1).min() > 1e-3


def test_steps_before_the_window_of_b2_diffurl_are_noisy_and_shared_by_a_branch():
    cfg = Sampling(
        num_steps=6,
        samples_per_prompt=4,
        eta=0.9,
        kernel=DDIM(),
        seeds_per_prompt=2,
        untrained_steps="shared_sde",
    )
    trajectory = draw(pixel_policy(), cfg, steps=(3, 4))
    assert noisy_steps(trajectory) == [0, 1, 2, 3, 4]
    assert trajectory.trained.any(0).tolist() == [False, False, False, True, True, False]
    assert [len(trajectory.unique_states(k)) for k in range(6)] == [6, 6, 6, 6, 12, 12]
    deterministic = draw(pixel_policy(), dataclasses.replace(cfg, untrained_steps="ode"), (3, 4))
    assert (trajectory.state(0) == deterministic.state(0)).all()
    assert (trajectory.state(1) != deterministic.state(1)).flatten(1).any(1).all()


def test_what_a_shared_noisy_step_drew_is_replayed():
    policy, kernel = pixel_policy(), DDIM()
    cfg = Sampling(
        num_steps=6,
        samples_per_prompt=4,
        eta=0.9,
        kernel=kernel,
        seeds_per_prompt=1,
        untrained_steps="shared_sde",
    )
    trajectory = draw(policy, cfg, steps=(3, 4))
    for k in range(5):
        assert_close(replayed(policy, trajectory, kernel, k, 64), trajectory.logp[:, k])


def test_a_shorter_tail_evaluates_fewer_steps_and_ends_nearer_the_fine_ode(monkeypatch):
    policy, calls = pixel_policy(), []
    plain = policy.velocity
    monkeypatch.setattr(policy, "velocity", lambda *a: calls.append(1) or plain(*a))
    cfg = Sampling(num_steps=12, samples_per_prompt=4, eta=0.5, tail_ratio=0.5)
    short = draw(policy, cfg, steps=(0, 1))
    assert len(calls) == 2 + 5  # of ten steps after the window
    assert cfg.tail((0, 1)) == [2, 4, 6, 8, 10, 12]
    assert cfg.skipped((0, 1)) == {2, 4, 6, 8, 10}
    fine, coarse = (
        ode_from(policy, short.state(2), short.sigmas[2], count, short.cond) for count in (400, 5)
    )
    assert off(short.state(12), fine) < 0.5 * off(coarse, fine)
    assert (short.state(3) == short.state(2)).all()


def test_a_tail_of_all_its_steps_keeps_the_schedule():
    cfg = Sampling(num_steps=6, samples_per_prompt=2, tail_ratio=1.0)
    assert cfg.tail((1,)) == [2, 3, 4, 5, 6]
    assert not cfg.skipped((1,))
    assert not Sampling(num_steps=6, samples_per_prompt=2).skipped((1,))


def off(got, wanted):
    return float((got - wanted).square().mean().sqrt())


def ode_from(policy, x, sigma, count, cond):
    """Where Euler steps of equal length lead from x at sigma."""
    grid = torch.linspace(float(sigma), 0.0, count + 1)
    with torch.no_grad():
        for k in range(count):
            x = x + (grid[k + 1] - grid[k]) * policy.velocity(x, grid[k], take_rows(cond, ROWS))
    return x


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"untrained_steps": "sde", "branching": Tree()},
            "is Tree, but untrained_steps sde .* set branching to Chain",
        ),
        (
            {"untrained_steps": "sde", "merge": 2.2},
            "merge is 2.2, but untrained_steps sde",
        ),
        (
            {"untrained_steps": "shared_sde", "tail_ratio": 0.4},
            "0.4, but untrained_steps",
        ),
        ({"merge": 2.2, "tail_ratio": 0.4}, "tail_ratio is 0.4, but merge 2.2 moves"),
    ],
)
def test_noise_outside_the_window_that_fits_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(num_steps=6, samples_per_prompt=4, **settings)

"""Measured step weights: measurements, resulting weights, and exact updates."""

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml
from torch.testing import assert_close

from flowalign.credit import Contrast, Gain, Outcome
from flowalign.data.requests import Requests
from flowalign.functional.signal import Moments, best_weights
from flowalign.losses import GRPO, PPOClip, StepDPO
from flowalign.runs.config import load
from flowalign.sampling.sde_windows import Fixed, Random, RandomSubset
from flowalign.training.policy_gradient import step_gradients
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop, update
from flowalign.training.policy_gradient.step_gradients import (
    Averages,
    HalvesObserver,
    MeasuredWeight,
    StepGradients,
    halves,
)
from flowalign.training.policy_gradient.step_plan import evaluations
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.state_values import OutcomeHistory
from flowalign.types import Batch, plain_requests
from flowalign.utils.errors import ConfigError
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.run_files import CONFIGS
from tests.fixtures.training import (
    PROMPTS,
    checked,
    flat,
    new_learner,
    new_recipe,
    new_rewards,
    train,
)

MEANS = torch.tensor([[0.5, 0.0, 0.2], [0.1, 0.3, 0.0], [0.2, 0.0, 0.1]])
SCALES = torch.tensor([0.1, 0.2, 0.3])
TRAINED = torch.tensor([True, True, True, False])


def one_batch(learner, **recipe):
    cfg = new_recipe(**recipe)
    return cfg, judged(cfg, learner)[0]


def averages(signal: list[float], noise: list[float], evidence: float) -> Averages:
    """Averages of independent steps that were all measured together."""
    known = torch.full((len(signal), len(signal)), evidence).double()
    parts = [torch.diag(torch.tensor(part).double()) * evidence for part in (signal, noise)]
    return Averages(*parts, known)


# Averages and weights -----------------------------------------------------------------------------


def test_an_average_starts_at_the_first_measurement_and_forgets():
    """Of 1, 4 and 2 with a decay of 1/2: 1; (1/4 + 4/2) / (3/4) = 3; (1/8 + 1 + 1) / (7/8)."""
    steps, now, seen = torch.tensor([1]), Averages.none(3), []
    for value in (1.0, 4.0, 2.0):
        one = torch.tensor([[value]], dtype=torch.float64)
        now = now.after(Moments(one, 10 * one), steps, 0.5)
        seen.append([float(part) for part in now.of(steps)])
    assert seen[0] == [1, 10]
    assert seen[1] == pytest.approx([3, 30])
    assert seen[2] == pytest.approx([17 / 7, 170 / 7])
    assert now.evidence.diagonal().tolist() == [0, 7 / 8, 0]


def test_pairs_are_averaged_over_the_updates_that_trained_both():
    """Steps 0 and 1, then 1 and 2: the pair of 0 and 2 is unknown, step 1 was measured twice."""
    two, now = torch.tensor([[1.0, 2.0], [2.0, 3.0]]).double(), Averages.none(3)
    for steps, value in (([0, 1], two), ([1, 2], 10 * two)):
        now = now.after(Moments(value, value), torch.tensor(steps), 0.5)
    signal = now.of(torch.arange(3)).signal
    assert signal[0, :2].tolist() == [1, 2]
    assert signal[0, 2] == 0
    assert signal[1, 1] == pytest.approx((3 / 4 + 10 / 2) / (3 / 4))
    assert signal[2, 1:].tolist() == [20, 30]


def test_weights_move_from_the_start_to_the_best_as_evidence_grows():
    """Best are 4, 1, 1, by signal / noise: 2, .5, .5 of mean 1; the start 1, 1, 4 is .5, .5, 2."""
    cfg, start = MeasuredWeight(start="uniform"), torch.tensor([1.0, 1.0, 4.0, 0.0])
    shares = {0.0: [0.5, 0.5, 2.0, 0], 0.5: [1.25, 0.5, 1.25, 0], 1.0: [2.0, 0.5, 0.5, 0]}
    for evidence, wanted in shares.items():
        known = averages([4.0, 1.0, 2.0, 0.0], [1.0, 1.0, 2.0, 0.0], evidence)
        assert cfg.weights(known, start, TRAINED).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("floor", [0.0, 0.05, 0.5, 1.0])
def test_no_trained_step_falls_under_the_floor(floor):
    known = averages([100.0, 1.0, -1.0, 0.0], [1.0, 1.0, 1.0, 0.0], 1.0)
    found = MeasuredWeight(floor=floor).weights(known, torch.ones(4), TRAINED)
    assert found.sum() == pytest.approx(3)
    assert found[1:3].min() == pytest.approx(floor * float(found.max()), abs=1e-6)
    assert found[3] == 0


def test_a_step_that_was_never_measured_keeps_its_start():
    """Steps 0 and 1 share their weight, 2, by their signal; the new step 2 stays at 1."""
    known = Averages.none(4).after(
        Moments(torch.diag(torch.tensor([3.0, 1.0])).double(), torch.eye(2).double()),
        torch.tensor([0, 1]),
        0.0,
    )
    found = MeasuredWeight(start="uniform").weights(known, torch.ones(4), TRAINED)
    assert found.tolist() == pytest.approx([1.5, 0.5, 1, 0])


def test_without_any_signal_the_weights_are_those_of_the_start():
    known = averages([-1.0, -2.0, -1.0, 0.0], [1.0, 1.0, 1.0, 0.0], 1.0)
    given = MeasuredWeight(start="uniform")
    found = given.weights(known, torch.tensor([1.0, 2.0, 3.0, 0.0]), TRAINED)
    assert found.tolist() == [0.5, 1, 1.5, 0]


def test_while_signal_is_unknown_noise_alone_says_how_steps_weigh():
    """Noise of 1, 4 and 16 has roots of 1, 2 and 4: weights 4, 2 and 1 of mean 1."""
    known = averages([-1.0, -2.0, -1.0, 0.0], [1.0, 4.0, 16.0, 1.0], 1.0)
    found = MeasuredWeight().weights(known, torch.ones(4), TRAINED)
    assert found.tolist() == pytest.approx([12 / 7, 6 / 7, 3 / 7, 0])
    first = MeasuredWeight().weights(Averages.none(4), torch.ones(4), TRAINED)
    assert first.tolist() == [1, 1, 1, 0]


# Gradients ----------------------------------------------------------------------------------------


def test_halves_keep_prompts_whole():
    samples = torch.tensor([11, 0, 5, 3, 8, 4, 7])  # prompts 2 0 1 0 2 1 1 of four samples each
    first, second = halves(samples, 4)
    assert first.tolist() == [0, 3]
    assert second.tolist() == [11, 5, 8, 4, 7]


def bandit(learner, cfg: MeasuredWeight, count: int) -> StepGradients:
    """Measurements of updates with MEANS as gradients, and noise of each prompt and step."""
    _, batch = one_batch(learner)
    steps, where = StepGradients(cfg, learner, 4, 1), learner.policy.denoiser[2].bias
    generator = torch.Generator().manual_seed(0)

    for _ in checked(2, range(count)):
        observer = HalvesObserver(steps, batch, torch.arange(12), measures=True)
        for half, prompts in enumerate((1, 2)):
            for k in range(3):
                noise = SCALES[k] * torch.randn(prompts, 3, generator=generator)
                where.grad = (MEANS[k] + noise).sum(0) / 3
                observer.after(row(half, k))
        observer.end()
    return steps


def row(half: int, k: int) -> Batch:
    """The row of a micro-batch of step k."""
    return Batch({"part": torch.tensor([half]), "k": torch.tensor([k])})


@pytest.mark.slow
def test_weights_become_the_known_best_ones():
    """Noise is 3 s^2 a prompt in three dimensions, and a third of it in an update of three."""
    steps = bandit(new_learner(), MeasuredWeight(half_life=30.0), 150)
    noise = torch.diag(SCALES.square())
    best = best_weights(Moments(MEANS @ MEANS.T, noise))
    wanted = best / best.mean()
    assert (wanted - 1).abs().max() > 1
    found = steps.cfg.weights(steps.averages, torch.ones(4), TRAINED)
    torch.testing.assert_close(found[:3], wanted, atol=0.25, rtol=0)
    seen = steps.averages.of(torch.arange(3))
    torch.testing.assert_close(seen.signal.float(), MEANS @ MEANS.T, atol=0.05, rtol=0)
    torch.testing.assert_close(seen.noise.float(), noise, atol=0.1, rtol=0.1)


def test_updates_are_measured_as_the_optimizer_scales_them():
    """AdamW has seen one gradient of .5, -2 and 0, so that v is its square and eps .5 is large."""
    learner = new_learner(eps=0.5)
    where = learner.policy.denoiser[2].bias
    assert bandit(learner, MeasuredWeight(measured="update"), 1).averages.evidence.sum() == 0
    for p in learner.parameters:
        p.grad = torch.zeros_like(p)
    where.grad = torch.tensor([0.5, -2.0, 0.0])
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    found = bandit(learner, MeasuredWeight(measured="update", half_life=30.0), 150)
    scaled = MEANS / torch.tensor([1.0, 2.5, 0.5])
    seen = found.averages.of(torch.arange(3)).signal.float()
    torch.testing.assert_close(seen, scaled @ scaled.T, atol=0.05, rtol=0)
    assert (scaled @ scaled.T - MEANS @ MEANS.T).abs().max() > 0.05 * 2


def test_an_update_that_is_not_finite_is_not_measured():
    learner = new_learner()
    _, batch = one_batch(learner)
    steps = StepGradients(MeasuredWeight(), learner, 4, 1)

    observer = HalvesObserver(steps, batch, torch.arange(12), measures=True)
    learner.parameters[0].grad = torch.full_like(learner.parameters[0], torch.inf)
    observer.after(row(0, 1))
    observer.end()
    assert steps.averages.evidence.sum() == 0
    assert learner.parameters[0].grad.isinf().all()


# Updates ------------------------------------------------------------------------------------------

MANY = {"prompts_per_step": 4, "updates_per_step": 2, "epochs_per_step": 2, "micro_batch": 5}
EQUAL = MeasuredWeight(floor=1.0, half_life=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        MANY,
        {"algorithm": GRPO(PPOClip(0.2), kl_coef=0.5), "sampling": {"sde_window": Random(2, 0, 3)}},
        MANY | {"algorithm": StepDPO()},
        MANY | {"algorithm": GRPO(PPOClip(0.02), chunk_sizes=[1, 2])},
    ],
    ids=["updates and epochs", "KL and moving windows", "pairs", "chunks"],
)
def test_equal_weights_make_the_updates_of_uniform_ones(recipe, request):
    given, measured = (new_learner(ema=(0.9, 1)) for _ in range(2))
    metrics = train(new_recipe(**recipe), given, steps=3)
    ours = train(new_recipe(**recipe, step_weight=EQUAL), measured, steps=3)
    torch.testing.assert_close(
        flat(measured.policy.denoiser), flat(given.policy.denoiser), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(measured.ema.average, given.ema.average, atol=1e-6, rtol=1e-5)
    assert metrics[2]["optim/grad_norm"] == pytest.approx(ours[2]["optim/grad_norm"], rel=1e-4)
    assert set(metrics[2]) == {n for n in ours[2] if not n.startswith("step_")}
    assert metrics[0].keys() != ours[0].keys()


def test_the_update_is_the_weighted_sum_of_the_gradients_of_the_steps():
    """By the loss of given numbers, which has no KL term here."""
    numbers = [2.0, 0.7, 0.3, 1.0]
    got = []
    for weight in (numbers, MeasuredWeight(start=numbers)):
        learner = new_learner()
        cfg, batch = one_batch(learner, step_weight=weight)
        assert batch.weight.tolist() == pytest.approx([2.0, 0.7, 0.3, 0.0])
        steps = StepGradients(cfg.measured, learner, 4, 1) if cfg.measured else None
        learner.step = lambda to=learner: got.append([p.grad.clone() for p in to.parameters]) or {}
        update(cfg, learner, batch, 0, 0, steps)
    torch.testing.assert_close(got[1], got[0], atol=1e-7, rtol=1e-5)


def test_a_projection_changes_what_is_measured_but_no_update(monkeypatch):
    numbers = MeasuredWeight(start=[2.0, 0.7, 0.3, 1.0], half_life=1e6)
    whole, small = new_learner(), new_learner()
    seen = [train(new_recipe(step_weight=numbers), whole)]
    monkeypatch.setattr(step_gradients, "MOST_BYTES", 0)
    monkeypatch.setattr(step_gradients, "PROJECTED", 64)
    seen.append(train(new_recipe(step_weight=numbers), small))
    assert torch.equal(flat(whole.policy.denoiser), flat(small.policy.denoiser))
    assert seen[0][0]["step_noise/0"] != seen[1][0]["step_noise/0"]


def test_what_is_measured_depends_neither_on_the_micro_batch_nor_on_the_weights():
    learner, found = new_learner(), []
    for changes in ({}, {"micro_batch": 2}, {"start": [3.0, 1.0, 0.1, 1.0]}):
        measured = MeasuredWeight(start=changes.pop("start", "uniform"))
        cfg, batch = one_batch(learner, step_weight=measured, **changes)
        steps = StepGradients(measured, learner, 4, 1)
        learner.step = dict
        update(cfg, learner, batch, 0, 0, steps)
        found.append(steps.averages)
        learner.optimizer.zero_grad(set_to_none=True)
    for other in found[1:]:
        torch.testing.assert_close(other.signal, found[0].signal, rtol=1e-3, atol=1e-9)
        torch.testing.assert_close(other.noise, found[0].noise, rtol=1e-3, atol=1e-9)


def test_the_moments_are_those_of_the_gradients_of_halves():
    """Prompt 0 against prompts 1 and 2, each gradient by automatic differentiation alone."""
    learner = new_learner()
    cfg, batch = one_batch(learner, step_weight="measured")
    steps = StepGradients(cfg.measured, learner, 4, 1)
    learner.step = dict
    update(cfg, learner, batch, 0, 0, steps)
    learner.optimizer.zero_grad(set_to_none=True)
    flats = []
    for rows in (torch.arange(4), torch.arange(4, 12)):
        for one in minibatches(batch, rows, 100):
            loss, _ = cfg.algorithm.loss(batch.fields(learner.policy, learner.reference), one)
            grads = torch.autograd.grad(one.num_rows / 36 * loss, learner.parameters)
            flats.append(torch.cat([g.flatten() for g in grads]))
    a, b = torch.stack(flats).double().view(2, 3, -1)
    found = steps.averages.of(torch.arange(3))
    torch.testing.assert_close(found.signal, (a @ b.T + b @ a.T) / 2 * 9 / 2, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(
        found.noise + found.signal, (a + b) @ (a + b).T, rtol=1e-3, atol=1e-9
    )


def test_no_gradient_chooses_its_own_weight():
    """The first step of the loop has the start's weights, and the second those of the first."""
    cfg = new_recipe(step_weight=MeasuredWeight(half_life=1.0, start="std"))
    first, second = train(cfg, new_learner(), steps=2)
    given = train(new_recipe(step_weight="std"), new_learner(), steps=1)[0]
    weights = [[row[f"step_weight/{k}"] for k in range(3)] for row in (first, second)]
    assert first["optim/grad_norm"] == pytest.approx(given["optim/grad_norm"], rel=1e-4)
    assert weights[0] != weights[1]
    assert sum(weights[1]) == pytest.approx(3)
    assert "step_weight/3" not in first
    assert first["step_noise/0"] > 0


def test_in_later_epochs_weights_have_seen_the_samples_and_nothing_is_measured():
    numbers = MeasuredWeight(start=[2.0, 0.7, 0.3, 1.0])
    found = [
        train(new_recipe(step_weight=numbers, epochs_per_step=n), new_learner())[0] for n in (1, 3)
    ]
    for k in range(3):
        assert found[0][f"step_signal/{k}"] == found[1][f"step_signal/{k}"]


def test_windows_that_move_leave_the_averages_of_other_steps_alone():
    cfg = new_recipe({"sde_window": Random(2, 0, 3)}, step_weight=MeasuredWeight(half_life=3.0))
    rows = train(cfg, new_learner(), steps=8)
    trained = [{k for k in range(4) if f"step_weight/{k}" in row} for row in rows]
    assert {2} == {len(steps) for steps in trained}
    assert len({min(steps) for steps in trained}) == 3
    for row, steps in zip(rows, trained, strict=True):
        assert sum(row[f"step_weight/{k}"] for k in steps) == pytest.approx(2)


def test_samples_whose_rewards_failed_are_left_out_of_both_halves():
    cfg = new_recipe(step_weight=MeasuredWeight(half_life=1.0), on_failed_reward="drop_sample")
    rewards = new_rewards("drop_sample")
    rewards.models[0].fail_on = "ccc"
    rows = train(cfg, new_learner(), rewards, steps=3)
    assert all(torch.tensor(row["step_weight/0"]).isfinite() for row in rows)
    assert rows[0]["transitions_dropped"] > 0
    rewards.models[0].fail_on = ""
    learner = new_learner()
    assert "step_signal/0" in train(cfg, learner, rewards)[0]
    assert learner.num_updates == 0


# Run files ----------------------------------------------------------------------------------------

SHAPES = str(CONFIGS / "shapes.yaml")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("measured", MeasuredWeight()),
        ("{measured: update}", MeasuredWeight(measured="update")),
        ("{half_life: 5, start: std}", MeasuredWeight(half_life=5.0, start="std")),
    ],
)
def test_run_files_name_measured_weights_alone_or_with_their_settings(tmp_path, written, meant):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"recipe": {"step_weight": yaml.safe_load(written)}}))
    run, text = load([SHAPES, str(overlay)])
    assert run.recipe.measured == meant
    (tmp_path / "resolved.yaml").write_text(text)
    assert load(str(tmp_path / "resolved.yaml"))[0].recipe.measured == meant


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("measure", "recipe.step_weight: Expected a typing.Literal['uniform', 'std', 'dt'"),
        ("{half_life: 0}", "half_life is 0.0; it must be above 0"),
        (
            "{measured: noise}",
            "step_weight.measured: Expected a typing.Literal['gradient', 'update']",
        ),
        ("{flor: 0.1}", "did you mean recipe.step_weight.floor?"),
        (
            "{start: [1, 2]}",
            "recipe.step_weight.start is [1.0, 2.0]; give a number for each of the 8",
        ),
    ],
)
def test_mistakes_in_run_files_are_named(written, said):
    with pytest.raises(ConfigError) as caught:
        load(SHAPES, ["--recipe.step_weight", written])
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


# Settings that single papers publish: a deviation by n - 1, extremes of a group, other ------------


def batch_of(cfg):
    seen = []
    batch, _ = judged(cfg, observe=seen.append)
    return batch, seen[0].values([cfg.sampling.num_steps])[:, 0, 0]


def test_a_deviation_by_n_minus_1_makes_advantages_smaller_by_its_root():
    """Four samples: the deviation grows by sqrt(4 / 3), except for the added 1e-4."""
    (plain, outcome), (corrected, same) = (
        batch_of(new_recipe(advantages={"std_correction": n})) for n in (0, 1)
    )
    assert_close(outcome, same)
    group = outcome[:4].double()
    deviation = (group - group.mean()).square().sum().div(3).sqrt()
    wanted = (group - group.mean()) / (deviation + 1e-4)
    assert_close(corrected.advantage[:4, 0].double(), wanted, rtol=1e-4, atol=1e-5)
    assert (plain.advantage[:4, 0].abs() > corrected.advantage[:4, 0].abs()).all()


def test_only_the_best_and_the_worst_of_a_prompt_are_trained_compared_with_all():
    sampling = {"samples_per_prompt": 8}
    all_of_them, outcome = batch_of(new_recipe(sampling))
    some, same = batch_of(new_recipe(sampling, advantages={"extremes": 2}))
    assert_close(outcome, same)
    for prompt in range(3):
        members = slice(8 * prompt, 8 * prompt + 8)
        order = outcome[members].argsort()
        chosen = torch.zeros(8, dtype=torch.bool)
        chosen[torch.cat([order[:2], order[-2:]])] = True
        assert (some.mask[members] == chosen[:, None] & all_of_them.mask[members]).all()
    assert (some.global_mask == some.mask).all()
    assert_close(some.advantage, all_of_them.advantage)  # compared with all eight


def test_a_plan_counts_the_extremes_alone():
    cfg = new_recipe({"samples_per_prompt": 8})
    whole = evaluations(cfg, [0, 1, 2])
    some = evaluations(replace(cfg, advantages=AdvantageConfig(extremes=2)), [0, 1, 2])
    assert (whole["training"], some["training"]) == (24, 12)
    assert whole["sampling"] == some["sampling"] == 32


def test_credit_of_states_between_refuses_a_shorter_tail():
    sampling = {"sde_window": Fixed(0, 2), "tail_ratio": 0.5}
    new_recipe(sampling, credit=Outcome())
    with pytest.raises(ValueError, match=r"tail_ratio is 0\.5, but Gain values .*\[0"):
        new_recipe(sampling, credit=Gain())


def test_a_plan_counts_the_steps_of_a_shorter_tail():
    cfg = new_recipe({"num_steps": 10, "sde_window": Fixed(0, 2), "tail_ratio": 0.5})
    assert evaluations(cfg, [0, 1])["sampling"] == 4 * (2 + 4)


def test_a_plan_counts_the_ratios_of_chunks_in_all_updates_but_the_first():
    """Twelve transitions of a prompt; three of four updates look at all of their samples first."""
    chunked = new_recipe(algorithm=GRPO(PPOClip(0.2), chunk_sizes=[1, 2]), updates_per_step=4)
    assert evaluations(chunked, [0, 1, 2])["ratios"] == 9
    assert evaluations(replace(chunked, updates_per_step=1), [0, 1, 2])["ratios"] == 0
    assert evaluations(new_recipe(updates_per_step=4), [0, 1, 2])["ratios"] == 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"untrained_steps": "sde", "sde_window": RandomSubset(0.6)},
        {"untrained_steps": "shared_sde", "seeds_per_prompt": 2, "sde_window": Fixed(2, 4)},
        {"tail_ratio": 0.5, "sde_window": Fixed(1, 3)},
    ],
    ids=["sde", "shared_sde", "tail"],
)
def test_a_loop_learns_with_other_steps_outside_the_window(sampling):
    learner = new_learner(PixelPolicy(seed=4))
    before = flat(learner.policy.denoiser)
    metrics = train(new_recipe({"num_steps": 6} | sampling, updates_per_step=2), learner, steps=2)
    assert not torch.equal(before, flat(learner.policy.denoiser))
    drift = [off for name, off in metrics[0].items() if name.startswith("check/ratio_drift")]
    assert drift
    assert max(drift) < 1e-5
    trained = len(sampling["sde_window"].steps(6, 0, torch.Generator()))
    assert metrics[0]["transitions"] == 12 * trained


def test_a_history_keeps_the_last_steps_and_what_failed_in_them():
    history = OutcomeHistory(2)
    for start in (0.0, 10.0, 20.0):
        history.add(["a", "b"], torch.tensor([[start], [start + 1], [start + 2], [math.nan]]))
    known = history.of(["b", "c", "a"], torch.zeros(1, 1), 2)
    assert known.prompt.tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    assert_close(
        known.value[:, 0],
        torch.tensor([12.0, math.nan, 22.0, math.nan, 10.0, 11.0, 20.0, 21.0]),
        equal_nan=True,
    )
    again = OutcomeHistory(2)
    again.restore(json.loads(json.dumps(history.state(), allow_nan=False)))
    assert again.steps == history.steps
    assert history.of(["c"], torch.zeros(1, 1), 2).value.shape == (0, 1)
    assert history.of(["a"], torch.zeros(1, 1), 1).value.tolist() == [[20.0], [21.0]]


def contrasting(history, learner=None):
    sampling = {"samples_per_prompt": 8, "seeds_per_prompt": 2}
    credit = Contrast(threshold=0.2, history=history)
    cfg = new_recipe(sampling, credit=credit, advantages={"scale": "given"}, prompts_per_step=5)
    requests = Requests(plain_requests(PROMPTS), 3)
    return PolicyGradientLoop(cfg, learner or new_learner(), new_rewards(), requests, 0)


def test_a_loop_compares_with_the_outcomes_of_earlier_steps():
    with_history, without = contrasting(4), contrasting(0)
    both = [list(checked(2, loop.run(range(3)))) for loop in (with_history, without)]
    first, second = ([m["adv_abs_mean"] for m in metrics] for metrics in both)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert len(with_history.rollouts.history.steps) == 3
    assert not without.rollouts.history.steps


def test_a_loop_that_resumes_remembers_what_it_saw():
    whole = contrasting(2)
    list(whole.run(range(3)))
    begun = contrasting(2)
    list(begun.run(range(2)))
    state = json.loads(json.dumps(begun.state()))
    again = contrasting(2, begun.learner)
    again.restore(state)
    list(again.run([2]))
    assert torch.equal(flat(again.learner.policy.denoiser), flat(whole.learner.policy.denoiser))
    assert again.rollouts.history.steps == whole.rollouts.history.steps

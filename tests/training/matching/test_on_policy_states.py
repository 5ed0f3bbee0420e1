"""Teachers on the student's own states: visited states, teachers, and costs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from flowalign.distributed.processes import Processes
from flowalign.functional.transition import FlowSDE, transition
from flowalign.losses import OPD, SFT
from flowalign.sampling import AllButLast, Fixed, NoSteps, Sampling
from flowalign.training.checkpoint import latest
from flowalign.training.matching import OnPolicyStates, SamplerGrid, Uniform
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.matching_settings import STEP_FIELD
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.reference_models import Teacher, start_from
from flowalign.training.matching.residuals import matching_residuals, select_fields
from flowalign.training.matching.source import StreamContext
from flowalign.training.matching.states import ForwardNoise, GuidedStep, VisitedStates
from flowalign.types import plain_requests
from flowalign.utils.costs import Costs
from pipelines.network.weights import Lora
from tests.fixtures.embedded import new_sd3
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import as_recipe, pairs, recipe, train
from tests.fixtures.ranks import assert_two_equal_one, results_of_two, untimed
from tests.fixtures.scored import batch_of
from tests.fixtures.small_run import Killed, go, new_run
from tests.fixtures.stopped_runs import assert_same_run
from tests.fixtures.training import (
    ALONE,
    PROMPTS,
    context,
    flat,
    new_learner,
    new_rewards,
    trained_policy,
)

GRID = SamplerGrid(num_steps=4, stop=3, distinct=True)
RANDOM = {"sde_window": AllButLast()}
TEACHERS = ("red", "loud")
LORA = Lora(rank=2, alpha=4, target_modules=("attn.to_q", "attn.to_out.0"))


def on_policy(folder: Path, sampling=None, teachers=TEACHERS, **changes) -> OnPolicyStates:
    """Three prompts of two samples, four denoising steps; teachers take turns over the prompts."""
    prompts = folder / "routed.jsonl"
    rows = [{"prompt": p, "teacher": teachers[i % len(teachers)]} for i, p in enumerate(PROMPTS)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    given = {"num_steps": 4, "samples_per_prompt": 2, "eta": 0.8, "sde_window": NoSteps()}
    own = {"prompts": str(prompts), "prompts_per_step": 3, "teacher_field": "teacher"}
    return OnPolicyStates(sampling=Sampling(**given | (sampling or {})), **own | changes)


def saved(folder: Path, names=TEACHERS) -> dict[str, Teacher]:
    """Checkpoints of two networks."""
    for seed, name in enumerate(names):
        (folder / name).mkdir(exist_ok=True)
        trained_policy(seed + 5).save_weights(str(folder / name))
    return {name: Teacher(path=str(folder / name)) for name in names}


def settings(folder: Path, **changes):
    given = {
        "loss": SFT(on="all"),
        "states": VisitedStates(),
        "times": GRID,
        "times_per_sample": 2,
        "teachers": saved(folder),
    }
    return recipe(**given | changes)


def taught(folder: Path, processes: Processes = ALONE, policy=None, **changes):
    """Settings, and a learner that has their fields."""
    cfg, learner = settings(folder, **changes), new_learner(policy, processes)
    for name, teacher in cfg.teachers.items():
        learner.fields[name] = teacher.field(learner)
    return cfg, learner


def drawn(cfg, learner, batch):
    """All noise levels of a batch at once."""
    given = batch.first, (0, 0, 0), batch.steps, batch.visited
    return noise_for(cfg, learner.policy, batch.examples, *given).all()


# What is visited ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [NoSteps(), AllButLast()])
def test_points_are_the_states_that_the_student_visited(tmp_path, window):
    cfg, learner = taught(tmp_path, policy=trained_policy(2))
    batch = batch_of(
        on_policy(tmp_path, {"sde_window": window}).open(learner, StreamContext(new_rewards(), 0))
    )
    part = drawn(cfg, learner, batch)
    states = cfg.states.build(part, learner.policy, None)
    trajectory = batch.visited
    assert trajectory is not None
    seen = {float(s) for s in states["sigma"]}
    assert seen == {1.0, 0.75, 0.5}
    for i, (x, sigma) in enumerate(zip(states["x"], states["sigma"], strict=True)):
        k = trajectory.sigmas.tolist().index(float(sigma))
        assert_close(x, trajectory.state(k)[i // 2], atol=1e-5, rtol=1e-5)
    assert ("travelled" not in states) == isinstance(window, NoSteps)


def test_steps_from_visited_states_have_the_mean_and_the_density_that_were_sampled(tmp_path):
    loss = OPD(form="sampled", anchor=0.0)
    cfg, learner = taught(tmp_path, loss=loss, policy=trained_policy(2))
    batch = batch_of(on_policy(tmp_path, RANDOM).open(learner, StreamContext(new_rewards(), 0)))
    part = drawn(cfg, learner, batch)
    trajectory = batch.visited
    assert trajectory is not None
    states = cfg.states.build(part, learner.policy, None)
    with torch.no_grad():
        v = learner.policy.velocity(states["x"], states["sigma"], states["cond"])
    for i, sigma in enumerate(states["sigma"].tolist()):
        k, b = trajectory.sigmas.tolist().index(sigma), i // 2
        eta, x = trajectory.eta[b : b + 1, k], trajectory.state(k)[b : b + 1]
        own = transition(FlowSDE(), x, v[i : i + 1], trajectory.sigmas, k, eta)
        reached = transition(FlowSDE(), x, part["travelled"][i : i + 1], trajectory.sigmas, k, eta)
        assert_close(reached.mean, trajectory.state(k + 1)[b : b + 1], atol=1e-5, rtol=1e-5)
        moved = part["slope"][i] * (part["travelled"][i] - v[i])
        assert_close(moved, (reached.mean - own.mean)[0], atol=1e-5, rtol=1e-4)
        assert float(part["std"][i]) == pytest.approx(float(own.std))
        assert float(part["dt"][i]) == pytest.approx(0.25)
        assert float(part["logp_old"][i]) == float(trajectory.logp[b, k])
    fields = select_fields(cfg, learner)
    residuals = matching_residuals(cfg, learner.policy, states, fields)
    _, stats = cfg.loss.loss(residuals)
    assert float(stats["ratio_mean"]) == pytest.approx(1.0, abs=1e-4)
    assert float(stats["ratio_std"]) < 1e-4


def test_each_request_is_matched_to_its_own_teacher(tmp_path):
    cfg, learner = taught(tmp_path)
    stream = on_policy(tmp_path).open(learner, StreamContext(new_rewards(), 0))
    batch = batch_of(stream)
    asked = [r for r in stream.requests.batch(0, 3) for _ in range(2)]
    named = {prompt: TEACHERS[i % 2] for i, prompt in enumerate(PROMPTS)}
    assert list(batch.examples["teacher"]) == [named[r.prompt] for r in asked]
    assert set(batch.examples["teacher"]) == set(TEACHERS)
    states = cfg.states.build(drawn(cfg, learner, batch), learner.policy, None)
    fields = select_fields(cfg, learner)
    residuals = matching_residuals(cfg, learner.policy, states, fields)
    experts = {name: trained_policy(seed + 5) for seed, name in enumerate(TEACHERS)}
    for i, name in enumerate(states["teacher"]):
        x, sigma = states["x"][i : i + 1], states["sigma"][i : i + 1]
        cond = {key: value[i : i + 1] for key, value in states["cond"].items()}
        with torch.no_grad():
            expected = experts[name].velocity(x, sigma, cond)
        assert_close(residuals["target"][i : i + 1], expected, atol=1e-6, rtol=1e-5)


# Learning -----------------------------------------------------------------------------------------


def run_of(folder: Path, kind: str, processes: Processes = ALONE, steps: int = 3, **changes):
    """Weights and metrics after some steps of one of two kinds of distillation."""
    loss = {"regression": SFT(on="all"), "gradient": OPD(form="sampled", clip=0.2)}[kind]
    sampling = {} if kind == "regression" else RANDOM
    given = {"loss": loss, "updates_per_step": 2, "micro_batch": 4} | changes
    cfg, learner = taught(folder, processes, **given)
    stream = on_policy(folder, sampling).open(learner, StreamContext(new_rewards(), 0))
    metrics = train(cfg, learner, stream, steps)
    return flat(learner.policy.denoiser), untimed(metrics, "ratio_std")


@pytest.mark.slow
@pytest.mark.parametrize("loss", [SFT(on="all"), OPD(anchor=0.0)])
def test_the_student_comes_to_agree_with_both_teachers(tmp_path, loss):
    """Measured on the states that it visited at first; later ones are others."""
    cfg, learner = taught(tmp_path, loss=loss, times_per_sample=3)
    stream = on_policy(tmp_path, RANDOM | {"samples_per_prompt": 32}).open(
        learner, StreamContext(new_rewards(), 0)
    )
    data = drawn(cfg, learner, batch_of(stream, 99))

    def missed() -> float:
        states = cfg.states.build(data, learner.policy, None)
        fields = select_fields(cfg, learner)
        with torch.no_grad():
            residuals = matching_residuals(cfg, learner.policy, states, fields)
        return float(cfg.loss.loss(residuals)[0])

    before = missed()
    train(cfg, learner, stream, 25)
    assert missed() < 0.7 * before


@pytest.mark.parametrize("kind", ["regression", "gradient"])
def test_micro_batches_change_no_update(tmp_path, kind):
    few, many = (run_of(tmp_path, kind, micro_batch=size)[0] for size in (2, 64))
    assert_close(few, many, atol=1e-6, rtol=1e-5)


def test_a_run_costs_what_the_plan_says(tmp_path):
    costs, policy = Costs(), PixelPolicy()
    costs.count(policy.denoiser)
    cfg, learner = taught(tmp_path, policy=policy, loss=OPD())
    whole = as_recipe(cfg, on_policy(tmp_path, RANDOM))
    before = costs.sampling_evaluations, costs.training_evaluations
    train(whole, learner, whole.data.open(learner, StreamContext(new_rewards(), 0)), 2)
    rows = whole.plan(context(), policy.plan(), 1).work.rows()
    counted = "24 sampling + 12 training + 12 reference + 12 teachers"
    assert rows == {"network evaluations per step": counted}
    assert costs.training_evaluations - before[1] == 2 * 12
    assert costs.sampling_evaluations - before[0] == 2 * (24 + 12 + 12)


class MortalPolicy(PixelPolicy):
    """Ends the process at its n-th encoding of prompts."""

    left = 10**6

    def encode(self, requests):
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().encode(requests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["regression", "gradient"])
def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path, kind):
    def whole(folder, policy):
        loss = OPD(form="sampled", clip=0.2) if kind == "gradient" else SFT(on="all")
        cfg = settings(tmp_path, loss=loss, updates_per_step=2, cold_start="average")
        learned = as_recipe(cfg, on_policy(tmp_path, RANDOM))
        return replace(new_run(folder), recipe=learned, policy=policy)

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    go(whole(straight, PixelPolicy()))
    mortal = MortalPolicy()
    mortal.left = 3
    with pytest.raises(Killed):
        go(whole(broken, mortal))
    newest = latest(broken / "checkpoints")
    assert newest is not None
    go(whole(broken, PixelPolicy()), newest)
    assert_same_run(straight, broken, 5)


# Cold start ---------------------------------------------------------------------------------------


def test_a_student_and_its_averages_start_as_the_mean_of_the_teachers(tmp_path):
    learner = new_learner(ema=(0.9, 1))
    start_from("average", learner, [t.path for t in saved(tmp_path).values()])
    mean = (flat(trained_policy(5).denoiser) + flat(trained_policy(6).denoiser)) / 2
    assert_close(flat(learner.policy.denoiser), mean)
    assert learner.ema is not None
    assert_close(torch.cat([a.flatten() for a in learner.ema.average]), mean)


@pytest.mark.slow
def test_adapters_start_with_the_update_nearest_to_the_mean_of_the_teachers(tmp_path):
    products, paths = [], []
    for seed in (1, 2):
        policy = new_sd3(lora=LORA)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in policy.denoiser.parameters():
                if p.requires_grad:
                    p.copy_(0.1 * torch.randn(p.shape, generator=draw))
        paths.append(str(tmp_path / f"{seed}"))
        Path(paths[-1]).mkdir()
        policy.save_weights(paths[-1])
        products.append(updates(policy))
    policy = new_sd3(lora=LORA)
    learner = new_learner(policy)
    base = [p.clone() for p in policy.denoiser.parameters() if not p.requires_grad]
    start_from("merge", learner, paths)
    for name, update in updates(policy).items():
        mean = (products[0][name] + products[1][name]) / 2
        beyond = torch.linalg.svdvals(mean)[LORA.rank :].norm()
        assert_close((update - mean).norm(), beyond, atol=1e-4, rtol=1e-3)
    frozen = [p for p in policy.denoiser.parameters() if not p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(base, frozen, strict=True))


def updates(policy) -> dict[str, torch.Tensor]:
    """The update of each adapter, up to its scale."""
    named = dict(policy.denoiser.named_parameters())
    downs = {n: p for n, p in named.items() if ".lora_A." in n}
    return {n: (named[n.replace("_A", "_B")] @ p).detach() for n, p in downs.items()}


def test_without_adapters_or_teachers_there_is_nothing_to_merge(tmp_path):
    with pytest.raises(ValueError, match="cold_start is merge, but the policy trains no LoRA"):
        start_from("merge", new_learner(), [t.path for t in saved(tmp_path).values()])
    with pytest.raises(ValueError, match=r"cold_start is average, but recipe.teachers is empty"):
        settings(tmp_path, teachers={}, cold_start="average")


# Points off the data ------------------------------------------------------------------------------


def test_rows_of_a_guided_step_cost_what_the_plan_says_and_micro_batches_change_nothing(tmp_path):
    cfg = recipe(
        loss=SFT(on="all"),
        states=GuidedStep(count=2, guidance_scale=1.0, num_steps=5, weight=0.5),
        times=Uniform(low=0.2),
        micro_batch=64,
    )
    found = []
    for size in (64, 2):
        costs, policy = Costs(), trained_policy(3)
        costs.count(policy.denoiser)
        learner = new_learner(policy)
        step = cfg.states.field(policy)
        assert step is not None
        learner.fields[STEP_FIELD] = step
        sized = replace(cfg, micro_batch=size)
        examples = batch_of(
            on_policy(tmp_path).open(new_learner(), StreamContext(new_rewards(), 0))
        ).examples
        train(sized, learner, examples.without("teacher"), 2)
        assert costs.training_evaluations == 2 * 6 * 3
        assert costs.sampling_evaluations == 2 * 6
        found.append(flat(policy.denoiser))
    assert cfg.evaluations_beside(PixelPolicy())["steps to states"] == 1
    assert (
        replace(cfg, states=GuidedStep()).evaluations_beside(PixelPolicy())["steps to states"] == 2
    )
    assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


def test_levels_of_points_belong_to_the_sample_whichever_process_draws_them():
    cfg = recipe(loss=SFT(), states=GuidedStep(count=3), times_per_sample=2)
    plain = recipe(loss=SFT(), times_per_sample=2)
    rows = pairs(3).without("pair", "desirable")
    whole = noise_for(cfg, PixelPolicy(), rows, 0, (4, 1, 0))
    later = noise_for(cfg, PixelPolicy(), rows.take(torch.arange(2, 6)), 2, (4, 1, 0))
    assert whole.uniform.shape == (12, 3)
    assert torch.equal(whole.uniform[4:], later.uniform)
    assert len(whole.uniform.unique()) == 36
    assert torch.equal(noise_for(plain, PixelPolicy(), rows, 0, (4, 1, 0)).noise, whole.noise)


def test_the_step_to_the_points_is_guided_and_has_no_gradient():
    policy = new_sd3(lora=LORA)
    step = GuidedStep(guidance_scale=2.5).field(policy)
    assert step is not None
    both = new_sd3(lora=LORA, guidance=2.0)
    requests, sigma = plain_requests(["a red circle", "two"]), torch.tensor([0.3, 0.8])
    x, cond = policy.noise(2, torch.Generator().manual_seed(2)), policy.encode(requests)
    empty = {k.removesuffix("_neg"): v for k, v in both.encode(requests).items() if "_neg" in k}
    with torch.no_grad():
        with_text, without = (policy.velocity(x, sigma, some) for some in (cond, empty))
    got = step.velocity(x, sigma, cond)
    assert_close(got, without + 2.5 * (with_text - without), atol=1e-4, rtol=1e-4)
    assert not got.requires_grad
    assert GuidedStep(guidance_scale=1.0).field(policy) is policy


# Refusals -----------------------------------------------------------------------------------------


def check(folder: Path, data: OnPolicyStates | None = None, policy=None, **changes) -> None:
    whole: Matching = as_recipe(settings(folder, **changes), data or on_policy(folder))
    whole.check(context(policy=policy or PixelPolicy()))


def test_a_whole_recipe_is_accepted(tmp_path):
    check(tmp_path)
    check(tmp_path, on_policy(tmp_path, RANDOM), loss=OPD())


def test_points_times_and_losses_that_do_not_fit_are_refused(tmp_path):
    window = {"sde_window": Fixed(0, 2)}
    wrong = {
        "states is ForwardNoise, and data of class OnPolicyStates are trajectories": {
            "states": ForwardNoise()
        },
        "must be a SamplerGrid of the 4 steps": {"times": SamplerGrid(num_steps=5)},
        "OPD needs dt, logp_old, slope, std, travelled, which data of class": {"loss": OPD()},
        r"times has the steps \[2\], at which": {
            "loss": OPD(),
            "data": on_policy(tmp_path, window),
        },
        "recipe.teachers names old, which is a reserved name": {
            "teachers": {"old": Teacher(path="x")}
        },
        "routed.jsonl:1: teacher is 'red', and recipe.teachers has loud": {
            "teachers": {"loud": Teacher(path="x")}
        },
        "names 0 teachers and recipe.data.teacher_field": {"teachers": {}},
        "recipe.teachers names deaf, and no row": {
            "teachers": saved(tmp_path, ("red", "loud", "deaf"))
        },
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            check(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"tail_ratio is 0\.5, but every state"):
        on_policy(tmp_path, {"tail_ratio": 0.5})
    guided = PixelPolicy()
    guided.evaluations_per_velocity, guided.guidance = 2, 3.0
    with pytest.raises(ValueError, match=r"policy.guidance is 3.0, but .*: set it to 1.0"):
        check(tmp_path, on_policy(tmp_path, RANDOM), guided, loss=OPD())


# Two processes ------------------------------------------------------------------------------------


def _made(kind: str, folder: Path, processes: Processes):
    mine = folder / f"of{processes.rank}"
    mine.mkdir(exist_ok=True)
    return run_of(mine, kind, processes)


@pytest.mark.slow
def test_two_processes_make_the_updates_and_metrics_of_one(tmp_path):
    kinds = "regression", "gradient"
    results = results_of_two(_made, kinds, tmp_path)
    for kind in kinds:
        assert_two_equal_one(results(kind), run_of(tmp_path, kind))

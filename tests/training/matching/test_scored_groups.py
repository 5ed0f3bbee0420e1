"""Scored groups: samples of a prompt, their advantages, and the noise levels they count at."""

import math
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.credit import Branch, Critic, Gain, LambdaReturn, NextValue, Outcome
from flowalign.distributed.processes import Processes
from flowalign.functional.agreement import spearman
from flowalign.functional.noise_matching import step_at
from flowalign.functional.solver import second_order_step
from flowalign.losses import AWM, CRD, DGPO, NFT, SFT
from flowalign.rewards import Rewards, Thresholds
from flowalign.sampling.sde_windows import AllButLast, Fixed, NoSteps
from flowalign.training.checkpoint import latest, read_loop
from flowalign.training.matching import SamplerGrid, StoredDataset, Uniform
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.reference_models import Average
from flowalign.training.matching.stored_credit import lead_of_chosen
from flowalign.training.reference import EMA
from flowalign.types.trajectory import Completion
from flowalign.utils.costs import Costs
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.preference import as_recipe, painted, recipe, stored, train
from tests.fixtures.ranks import assert_two_equal_one, results_of_two, untimed
from tests.fixtures.scored import Weighed, batch_of, groups, opened
from tests.fixtures.small_run import Killed, Mortal, go, new_run, weigh
from tests.fixtures.sources import OwnSource, SourcePolicy, write_sources
from tests.fixtures.stopped_runs import assert_same_run
from tests.fixtures.training import (
    ALONE,
    context,
    flat,
    new_learner,
    new_recipe,
    new_rewards,
    trained_policy,
)

STOCHASTIC = {"sde_window": AllButLast()}
GRID = SamplerGrid(num_steps=4, distinct=True)


def redness(latents):
    pixels = latents.sigmoid()
    return pixels[:, 0] - pixels[:, 2]


# The source ---------------------------------------------------------------------------------------


def test_every_sample_has_its_advantage_among_those_of_its_prompt(tmp_path):
    stream = opened(groups(tmp_path))
    batch = batch_of(stream)
    examples = batch.examples
    value = redness(examples["latents"]).view(3, 4)
    centred = value - value.mean(1, keepdim=True)
    expected = centred / (value.std(1, correction=0, keepdim=True) + 1e-4)
    assert_close(examples["advantage"], expected.flatten(), atol=2e-4, rtol=1e-4)
    assert (batch.first, batch.total, batch.steps) == (0, 12, None)
    assert examples["group"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    asked = stream.requests.batch(0, 3)
    lengths = [float(len(r.prompt)) for r in asked for _ in range(4)]
    assert examples["cond"]["length"][:, 0].tolist() == lengths
    assert torch.equal(examples["desirable"], examples["advantage"] > 0)
    assert_close(examples["scores"]["redness"], value.flatten(), atol=1e-6, rtol=0)
    assert batch.metrics["reward_mean"] == pytest.approx(float(value.mean()), abs=1e-6)
    assert batch.metrics["zero_std_ratio"] == 0
    assert stream.held_out() is None


def test_samples_are_those_of_the_deterministic_sampler_of_either_order(tmp_path):
    policy = trained_policy(3)
    for ratio in (None, 1.0):
        stream = opened(groups(tmp_path, {"tail_ratio": ratio}), new_learner(policy))
        latents = batch_of(stream).examples["latents"]
        x = torch.cat([policy.noise(4, generator(0, "noise", 0, i)) for i in range(3)])
        cond = policy.encode([r for r in stream.requests.batch(0, 3) for _ in range(4)])
        sigmas, before = torch.linspace(1, 0, 5), None
        for k in range(4):
            with torch.no_grad():
                v = policy.velocity(x, sigmas[k], cond)
            x0 = x - sigmas[k] * v
            if ratio and before is not None:
                x = second_order_step(x, x0, before, sigmas[k - 1], sigmas[k], sigmas[k + 1])
            else:
                x = x + (sigmas[k + 1] - sigmas[k]) * v
            before = x0
        assert_close(latents, x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights", ["old", "behaviour", "ema"])
def test_averages_sample_while_the_policy_stays_as_it_is(tmp_path, weights):
    learner = new_learner(PixelPolicy(seed=1))
    other = trained_policy(2)
    now = flat(learner.policy.denoiser)
    learner.averages[weights] = EMA(list(other.denoiser.parameters()), 0.5)
    learner.averages[weights].parameters = learner.parameters
    drawn = batch_of(opened(groups(tmp_path, weights=weights), learner)).examples["latents"]
    assert torch.equal(
        drawn, batch_of(opened(groups(tmp_path), new_learner(other))).examples["latents"]
    )
    assert not torch.equal(drawn, batch_of(opened(groups(tmp_path), learner)).examples["latents"])
    assert torch.equal(flat(learner.policy.denoiser), now)


def test_only_the_best_and_the_worst_of_a_group_are_examples(tmp_path):
    everyone = batch_of(opened(groups(tmp_path, {"samples_per_prompt": 7})))
    cfg = groups(tmp_path, {"samples_per_prompt": 7}, advantages={"extremes": 2})
    few = batch_of(opened(cfg))
    advantage = everyone.examples["advantage"].view(3, 7)
    order = advantage.argsort(1)
    kept = torch.cat([order[:, :2], order[:, -2:]], 1).sort(1).values
    rows = (kept + 7 * torch.arange(3)[:, None]).flatten()
    assert torch.equal(few.examples["latents"], everyone.examples["latents"][rows])
    assert torch.equal(few.examples["advantage"], everyone.examples["advantage"][rows])
    assert (few.total, cfg.examples_per_step, cfg.rows_per_group) == (12, 12, 4)
    assert few.metrics["samples_dropped"] == 9


SEVEN = {"samples_per_prompt": 7}


def scouted(folder, steps, rewards=None, **changes):
    cfg = groups(folder, SEVEN | changes, advantages={"extremes": 2}, scout_steps=steps)
    return batch_of(opened(cfg, new_learner(trained_policy(3)), rewards))


@pytest.mark.parametrize("ratio", [None, 0.5, 1.0])
def test_scouts_with_all_steps_are_the_extremes(tmp_path, ratio):
    cfg = groups(tmp_path, SEVEN | {"tail_ratio": ratio}, advantages={"extremes": 2})
    whole = batch_of(opened(cfg, new_learner(trained_policy(3))))
    scouts = scouted(tmp_path, 4, tail_ratio=ratio)
    for name in ("latents", "advantage", "group"):
        assert torch.equal(scouts.examples[name], whole.examples[name])
    for name, score in whole.examples["scores"].items():
        assert_close(scouts.examples["scores"][name], score)  # scored in batches of another size
    expected = {**whole.metrics, "scouts/rank_correlation": 1.0}
    assert scouts.metrics == pytest.approx(expected, rel=1e-5)


def test_previews_choose_the_samples_that_are_made_with_all_steps(tmp_path):
    previews = batch_of(
        opened(groups(tmp_path, SEVEN | {"num_steps": 2}), new_learner(trained_policy(3)))
    ).examples
    finals = batch_of(opened(groups(tmp_path, SEVEN), new_learner(trained_policy(3)))).examples
    order = previews["advantage"].view(3, 7).argsort(1)
    kept = torch.cat([order[:, :2], order[:, -2:]], 1).sort(1).values
    rows = (kept + 7 * torch.arange(3)[:, None]).flatten()
    found = scouted(tmp_path, 2)
    assert_close(found.examples["latents"], finals["latents"][rows])
    first, last = (one["scores"]["redness"][rows].view(3, 4) for one in (previews, finals))
    expected = sum(map(spearman, first, last)) / 3
    assert found.metrics["scouts/rank_correlation"] == pytest.approx(expected)


def test_scouts_with_constant_rewards_take_the_first_and_the_last(tmp_path):
    found = scouted(tmp_path, 2, new_rewards(redness=0.0))
    whole = batch_of(opened(groups(tmp_path, SEVEN), new_learner(trained_policy(3)))).examples
    rows = [7 * i + k for i in range(3) for k in (0, 1, 5, 6)]
    assert_close(found.examples["latents"], whole["latents"][rows])
    assert found.examples["advantage"].abs().max() == 0
    assert math.isnan(found.metrics["scouts/rank_correlation"])


def test_the_plan_counts_previews_and_samples(tmp_path):
    cfg = groups(tmp_path, SEVEN, advantages={"extremes": 2}, scout_steps=3)
    costs, policy = Costs(), trained_policy(3)
    costs.count(policy.denoiser)
    rewards = Rewards([Redness()], {"redness": 1.0}, costs=costs)
    batch_of(opened(cfg, new_learner(policy), rewards))
    work = cfg.plan(context(rewards=rewards), policy.plan(), 1).work
    assert work.evaluations["sampling"] == 3 * (7 * 3 + 4 * 4) == costs.network_evaluations
    assert work.decodes == 3 * (7 + 4) == costs.decodes


@pytest.mark.parametrize(("rule", "left"), [("drop_sample", 8), ("drop_group", 8)])
def test_samples_whose_reward_failed_are_no_examples(tmp_path, rule, left):
    asked = opened(groups(tmp_path)).requests.batch(0, 3)
    rewards = Rewards([Redness(fail_on=asked[1].prompt)], {"redness": 1.0})
    known = [asked[1].prompt not in r.prompt for r in asked]
    batch = batch_of(opened(groups(tmp_path, on_failed_reward=rule), rewards=rewards))
    assert batch.total == len(batch.examples["latents"]) == 4 * sum(known) == left
    assert batch.examples["group"].unique().tolist() == [i for i in range(3) if known[i]]
    assert batch.metrics["reward_invalid"] == pytest.approx(1 - sum(known) / 3)
    with pytest.raises(RuntimeError, match="rewards failed"):
        batch_of(opened(groups(tmp_path), rewards=rewards))


def test_a_prompt_without_spread_has_advantages_of_zero(tmp_path):
    cfg = groups(tmp_path, {"seeds_per_prompt": 1})  # one noise, no other: four equal samples
    batch = batch_of(opened(cfg))
    assert batch.examples["advantage"].tolist() == [0.0] * 12
    assert batch.metrics["zero_std_ratio"] == 1


def test_every_sample_is_conditioned_and_scored_with_its_own_source(tmp_path):
    cfg = replace(groups(tmp_path), prompts=write_sources(tmp_path), prompts_per_step=5)
    rewards = Rewards([OwnSource()], {"red": 1.0})
    batch = batch_of(opened(cfg, new_learner(SourcePolicy()), rewards))
    assert batch.metrics["reward/own"] == 1
    assert len(batch.examples["cond"]["length"].unique()) == 5


def test_a_batch_is_a_function_of_seed_step_and_policy_alone(tmp_path):
    cfg, learner = groups(tmp_path, STOCHASTIC, credit=Gain()), new_learner()
    late, straight = (list(opened(cfg, learner).batches(steps))[-1] for steps in ([2], [0, 1, 2]))
    assert torch.equal(late.examples["latents"], straight.examples["latents"])
    assert torch.equal(late.steps.advantage, straight.steps.advantage)
    for other in (opened(cfg, learner, seed=1), opened(cfg, new_learner(PixelPolicy(seed=3)))):
        assert not torch.equal(batch_of(other, 2).examples["latents"], late.examples["latents"])


# Noise levels and groups --------------------------------------------------------------------------


GROUP = ("group",)


def drawn(batch, loss, **changes):
    cfg = recipe(loss=loss, times=Uniform(), times_per_sample=3, **changes)
    return noise_for(cfg, PixelPolicy(), batch.examples, batch.first, (0, 0, 0), batch.steps)


@pytest.mark.parametrize("shared", [False, True])
def test_a_group_shares_times_and_if_asked_noise(tmp_path, shared):
    batch = batch_of(opened(groups(tmp_path)))
    data = drawn(batch, Weighed(also=GROUP, shared_noise=shared)).all()
    group, sigma, noise = data["group"], data["sigma"], data["noise"]
    assert group.unique(return_counts=True)[1].tolist() == [4] * 9
    for label in group.unique():
        rows = group == label
        assert len(sigma[rows].unique()) == 1
        assert len(noise[rows].unique(dim=0)) == (1 if shared else 4)
        assert len(data["latents"][rows].unique(dim=0)) == 4
    assert len(sigma.unique()) == 9
    apart = drawn(batch, Weighed()).all()
    assert (len(apart["sigma"].unique()), len(apart["noise"].unique(dim=0))) == (36, 36)


@pytest.mark.parametrize("loss", [Weighed(), Weighed(also=GROUP, shared_noise=True)])
def test_micro_batches_change_no_update(tmp_path, loss):
    def weights(size):
        learner = new_learner()
        stream = opened(groups(tmp_path), learner)
        cfg = recipe(loss=loss, times_per_sample=3, updates_per_step=2, micro_batch=size)
        train(cfg, learner, stream, steps=2)
        return flat(learner.policy.denoiser)

    assert_close(weights(64), weights(5), atol=1e-6, rtol=1e-5)


def test_whole_groups_are_never_divided(tmp_path):
    seen = []

    class Watching(Weighed):
        def loss(self, batch, context):
            seen.append(batch["group"].tolist())
            return super().loss(batch, context)

    learner = new_learner()
    cfg = recipe(loss=Watching(also=GROUP), times_per_sample=2, micro_batch=9, updates_per_step=2)
    train(cfg, learner, opened(groups(tmp_path), learner))
    assert all(rows.count(label) == 4 for rows in seen for label in rows)
    assert sorted(label for rows in seen for label in rows) == sorted([*range(6)] * 4)
    assert max(len(rows) for rows in seen) == 8


# Credit of denoising steps ------------------------------------------------------------------------


def test_an_example_counts_at_a_noise_level_by_the_step_there(tmp_path):
    cfg = groups(tmp_path, {"sde_window": Fixed(1, 3)}, credit=Gain())
    batch = batch_of(opened(cfg))
    assert "advantage" not in batch.examples
    steps, data = batch.steps, drawn(batch, Weighed())
    assert steps.trained.all(0).tolist() == [False, True, True, False]
    k = step_at(data.sigma, steps.sigmas)
    assert set(k.tolist()) == {1, 2}, "levels of untrained steps are left out"
    assert 0 < len(data) < 36
    found = data.all()
    assert_close(found["advantage"], steps.advantage[data.index, k])
    assert torch.equal(found["latents"], batch.examples["latents"][data.index])
    assert len(found["advantage"].unique()) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [Weighed(), NFT(), AWM(), DGPO(), CRD()], ids=lambda x: type(x).__name__
)
def test_credit_by_outcomes_is_the_published_method_at_trained_levels(tmp_path, loss):
    def weights(**credit):
        learner = new_learner()
        for name in ("old", "anchor"):
            Average(decay=0.5).follow(learner, name)
        stream = opened(groups(tmp_path, STOCHASTIC, **credit), learner)
        times = SamplerGrid(num_steps=4, stop=3, distinct=True)
        cfg = recipe(loss=loss, times=times, times_per_sample=3, updates_per_step=2)
        train(cfg, learner, stream, steps=2)
        return flat(learner.policy.denoiser)

    assert torch.equal(weights(credit=Outcome()), weights())
    assert not torch.equal(weights(credit=Gain()), weights())


def test_completions_are_the_latents_whose_values_are_credited(tmp_path):
    cfg = groups(tmp_path, {"sde_window": Fixed(0, 2)}, credit=NextValue(), clean="completion")
    learner = new_learner(trained_policy(5))
    batch = batch_of(opened(cfg, learner))
    steps = batch.steps
    assert sorted(steps.completed) == [0, 1]
    first, last = steps.completed[0], steps.completed[1]
    assert torch.equal(last, batch.examples["latents"]), "after the last noise the ODE ends there"
    assert not torch.allclose(first, last)
    values = torch.stack([redness(first), redness(last)], 1).view(3, 4, 2)
    spread = values.std(1, correction=0, keepdim=True) + 1e-4
    expected = ((values - values.mean(1, keepdim=True)) / spread).flatten(0, 1)
    assert_close(steps.advantage[:, :2], expected, atol=2e-4, rtol=1e-4)
    data = drawn(batch, Weighed())
    k = step_at(data.sigma, steps.sigmas)
    found = data.all()["latents"]
    for step in (0, 1):
        assert torch.equal(found[k == step], steps.completed[step][data.index[k == step]])


def test_extremes_of_steps_are_chosen_step_by_step(tmp_path):
    cfg = groups(tmp_path, STOCHASTIC, credit=Gain(), advantages={"extremes": 1})
    steps = batch_of(opened(cfg)).steps
    assert steps.trained.sum(0).tolist() == [6, 6, 6, 0]
    assert (steps.trained[:, 0] != steps.trained[:, 1]).any()


# The run ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_become_redder(tmp_path):
    learner = new_learner()
    stream = opened(groups(tmp_path, {"samples_per_prompt": 8}), learner)
    cfg = recipe(loss=Weighed(), times=GRID, times_per_sample=4)
    metrics = train(cfg, learner, stream, steps=15)
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.1


@pytest.mark.parametrize("credit", [None, Gain()])
def test_a_run_costs_what_the_plan_says(tmp_path, credit):
    costs, policy = Costs(), PixelPolicy()
    costs.count(policy.denoiser)
    learner, rewards = new_learner(policy), Rewards([Redness()], {"redness": 1.0}, costs=costs)
    cfg = groups(tmp_path, STOCHASTIC, credit=credit)
    times = SamplerGrid(num_steps=4, stop=3, distinct=True)
    whole = as_recipe(recipe(loss=Weighed(), times=times, times_per_sample=3), cfg)
    train(whole, learner, opened(cfg, learner, rewards), steps=2)
    plan = whole.plan(context(rewards=rewards), policy.plan(), 1)
    rows, work = plan.rows, plan.work
    # a level whose step has no credit is left out
    assert work.bounds == ({"evaluations"} if credit else set())
    assert costs.training_evaluations == 2 * work.count("training") == 2 * 36
    made = work.count("sampling") + work.count("completing")
    assert costs.sampling_evaluations == 2 * made
    assert costs.decodes == 2 * work.decodes
    assert costs.reward_calls == 2 * work.reward_calls
    assert rows["samples per step"] == "12 = 3 prompts x 4"
    assert rows.get("noise levels with credit") == (
        "0.75 to 1, 0.5 to 0.75, 0.25 to 0.5" if credit else None
    )


def matching(cfg, **changes) -> Matching:
    return as_recipe(recipe(loss=Weighed(), **changes), cfg)


@pytest.mark.slow
def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path):
    def whole(folder):
        cfg = groups(
            tmp_path,
            STOCHASTIC,
            credit=LambdaReturn(),
            critic=Critic(),
            advantages={"thresholds": Thresholds(at={"green": 0.4})},
            weights="behaviour",
        )
        behaviour = Average(decay=0.5)
        learned = matching(cfg, times=GRID, times_per_sample=2, behaviour=behaviour)
        return replace(new_run(folder, weights=weights), recipe=learned)

    weights = {"redness": 1.0, "green": 0.5}
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    go(whole(straight))
    with pytest.raises(Killed):
        go(replace(whole(broken), rewards=weigh([Mortal(3)], weights)))
    newest = latest(broken / "checkpoints")
    assert newest is not None
    go(whole(broken), newest)
    assert_same_run(straight, broken, 5)
    loop = read_loop(broken / "checkpoints" / "step-000005")["loop"]
    assert loop == read_loop(straight / "checkpoints" / "step-000005")["loop"]
    assert loop["data"]["multipliers"][0][1] != 0
    assert loop["data"]["critic"]


# Refusals -----------------------------------------------------------------------------------------


def test_settings_that_no_run_can_use_are_refused(tmp_path):
    wrong = {
        r"credit is Gain, which credits stochastic": {"credit": Gain()},
        r"recipe.data.advantages.extremes is 3: the best": {"advantages": {"extremes": 3}},
        r"shorten_extremes is true, but extremes": {"advantages": {"shorten_extremes": True}},
        r"scout_steps is 2; .* needs advantages.extremes, which is null": {"scout_steps": 2},
        r"scout_steps is 5; it must be at most": {"scout_steps": 5, "advantages": {"extremes": 1}},
        r"scout_steps previews samples, but with noise": {
            **{"sampling": STOCHASTIC, "scout_steps": 2, "advantages": {"extremes": 1}}
        },
        r"seeds_per_prompt is 1, but scout_steps 2 chooses": {
            "sampling": {"seeds_per_prompt": 1},
            **{"scout_steps": 2, "advantages": {"extremes": 1}},
        },
        r"recipe.data.clean is completion, but credit null values": {"clean": "completion"},
        r"samples_per_prompt is 1, so a group has": {"sampling": {"samples_per_prompt": 1}},
        r"recipe.data.advantages.scale is given": {"advantages": {"scale": "given"}},
        r"credit Outcome values finished samples": {
            "sampling": STOCHASTIC,
            "credit": Outcome(),
            "clean": "completion",
        },
        r"completion\.\w+ is \w+, but clean is completion": {
            "sampling": STOCHASTIC,
            "credit": Gain(),
            "clean": "completion",
            "completion": Completion(weights="reference"),
        },
        r"drawn from the same state": {"sampling": STOCHASTIC, "credit": Branch()},
        r"recipe.data.critic is null, but LambdaReturn": {
            "sampling": STOCHASTIC,
            "credit": LambdaReturn(),
        },
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            groups(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"recipe.sampling.sde_window NoSteps chooses no step"):
        new_recipe({"sde_window": NoSteps()})


def test_recipes_that_do_not_fit_the_data_are_refused(tmp_path):
    run, plan = context(), PixelPolicy().plan()
    with pytest.raises(ValueError, match=r"recipe.data.weights is ema, but ema is null"):
        matching(groups(tmp_path, weights="ema")).check(run)
    matching(groups(tmp_path, weights="ema")).check(replace(run, has_ema=True))
    with pytest.raises(ValueError, match=r"weights named old, and recipe.old is null"):
        matching(groups(tmp_path, weights="old")).check(run)
    with pytest.raises(ValueError, match=r"micro_batch is 3, but Weighed compares all of the 4"):
        as_recipe(recipe(loss=Weighed(also=GROUP), micro_batch=3), groups(tmp_path)).check(run)
    with pytest.raises(ValueError, match=r"times_per_sample is 5, but recipe\.times has 4"):
        matching(groups(tmp_path), times=GRID, times_per_sample=5).plan(run, plan, 1)
    with pytest.raises(ValueError, match=r"data.prompts_per_step is 3, fewer than the 4"):
        matching(groups(tmp_path)).plan(run, plan, 4)
    with pytest.raises(ValueError, match="rewards is empty"):
        matching(groups(tmp_path)).check(context(rewards=Rewards([], {})))
    as_recipe(recipe(loss=SFT()), groups(tmp_path)).check(run)


# Two processes ------------------------------------------------------------------------------------


def _outcomes(folder: Path):
    loss = Weighed(also=GROUP, shared_noise=True)
    return groups(folder, advantages={"extremes": 1}), {
        "loss": loss,
        "times_per_sample": 2,
    }


def _steps(folder: Path):
    cfg = groups(
        folder,
        STOCHASTIC,
        credit=Gain(),
        clean="completion",
        on_failed_reward="drop_sample",
        advantages={"scale": "batch"},
    )
    return cfg, {"loss": Weighed(), "times": GRID, "times_per_sample": 3, "updates_per_step": 2}


RUNS = {f.__name__: f for f in (_outcomes, _steps)}


def _made(name: str, folder: Path, processes: Processes):
    cfg, changes = RUNS[name](folder)
    learner = new_learner(processes=processes)
    rewards = Rewards([Redness(fail_on="bb")], {"redness": 1.0}) if name == "_steps" else None
    stream = opened(cfg, learner, rewards)
    metrics = train(recipe(**{"micro_batch": 4} | changes), learner, stream, 3)
    return flat(learner.policy.denoiser), untimed(metrics)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    groups(folder)
    return folder, results_of_two(_made, RUNS, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_make_the_updates_and_metrics_of_one(on_two, name):
    folder, results = on_two
    assert_two_equal_one(results(name), _made(name, folder, ALONE))


# Stored pairs whose denoising steps are weighted by credit from stored values of their ------------


CHOSEN = [[0.0, 1.0, 1.0, 4.0], [0.0, 0.0, 2.0, 3.0]]
REJECTED = [[0.0, 0.0, 2.0, 2.0], [0.0, 1.0, 1.0, 1.0]]
LEAD = tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 1.0]])
"""Gains of the chosen (1, 0, 3; 0, 2, 1) minus those of the rejected (0, 2, 0; 1, 0, 0), or 0."""
WEIGHT = LEAD / 1.75
"""The mean lead of the four steps with one is 7 / 4."""


def with_values(folder: Path, chosen=CHOSEN, rejected=REJECTED) -> str:
    """Two pairs of colours with the values of four states."""
    return painted(folder, 2, values_chosen=chosen, values_rejected=rejected)


def test_the_lead_is_the_difference_of_credit_where_it_is_positive():
    sigmas = torch.linspace(1, 0, 4)
    assert torch.equal(lead_of_chosen(Gain(), tensor(CHOSEN), tensor(REJECTED), sigmas), LEAD)
    reached = lead_of_chosen(NextValue(), tensor(CHOSEN), tensor(REJECTED), sigmas)
    assert reached.tolist() == [[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]]


def test_pairs_have_the_noise_levels_of_steps_with_a_lead_and_their_weights(tmp_path):
    stream = stored(with_values(tmp_path), new_learner(), credit=Gain(), batch_size=2)
    (batch,) = stream.batches([0])
    order = batch.examples["cond"]["length"][:2, 0].argsort()
    assert_close(batch.steps.weight[order], WEIGHT)
    cfg = recipe(times=SamplerGrid(num_steps=3, distinct=True), times_per_sample=3)
    levels = noise_for(cfg, PixelPolicy(), batch.examples, 0, (0, 0, 0), batch.steps)
    data = levels.all()
    k = step_at(levels.sigma, batch.steps.sigmas)
    found = torch.zeros(2, 3)
    found[levels.index, k] = data["weight"].chunk(2)[0]
    assert_close(found[order], WEIGHT)
    assert torch.equal(*data["weight"].chunk(2))


def test_the_loss_before_the_first_update_is_the_mean_weight_times_log_2(tmp_path):
    """The mean weights of the steps of either pair are 2 / 1.75 and 1.5 / 1.75."""
    cfg = recipe(times=SamplerGrid(num_steps=3, distinct=True), times_per_sample=3)
    learner = new_learner()
    stream = stored(with_values(tmp_path), learner, credit=Gain(), batch_size=1)
    (metrics,) = train(cfg, learner, stream)
    (batch,) = stream.batches([0])
    pair = int(batch.examples["cond"]["length"][0, 0]) - 1
    expected = (2.0, 1.5)[pair] / 1.75
    assert metrics["policy_loss"] == pytest.approx(expected * log(2), rel=1e-4)
    assert metrics["weight"] == pytest.approx(expected)


def test_data_and_methods_that_cannot_carry_credit_are_refused(tmp_path):
    path = with_values(tmp_path)
    for credit, word in (
        (Branch(), "drawn from the same state"),
        (LambdaReturn(decay=0.5), "needs predictions of a critic"),
    ):
        with pytest.raises(ValueError, match=word) as error:
            StoredDataset(path=path, credit=credit)
        assert "does not fit stored pairs" in str(error.value)
        assert len(str(error.value).splitlines()) <= 5
    with pytest.raises(ValueError, match=r"recipe\.data\.credit is Gain, but kind is samples"):
        StoredDataset(path=path, kind="samples", credit=Gain())
    StoredDataset(path=path, credit=Gain()).check_data(PixelPolicy())
    for values in ({"chosen": [[0.0, 1.0], CHOSEN[1]]}, {"rejected": [REJECTED[0], None]}):
        short = StoredDataset(path=with_values(tmp_path, **values), credit=Gain())
        with pytest.raises(ValueError, match="needs the columns values_chosen and") as error:
            short.check_data(PixelPolicy())
        assert len(str(error.value).splitlines()) <= 5
    plain = StoredDataset(path=painted(tmp_path, 2, "plain"), credit=Gain())
    with pytest.raises(ValueError, match="There are 0 and 0 values"):
        plain.check_data(PixelPolicy())


def test_credit_that_never_leads_is_refused(tmp_path):
    path = with_values(tmp_path, REJECTED, REJECTED)
    with pytest.raises(ValueError, match="gives the chosen item of no pair a lead"):
        stored(path, new_learner(), credit=Gain(), batch_size=2)

"""Rollout workers sample what the training process would sample, whatever happens to them."""

import json
import sys

import pytest
import torch

from flowalign.credit.gain import Gain
from flowalign.runs import load, plan, start, train
from flowalign.training.learner import TrainingFailure
from flowalign.training.rollouts.trajectory_tensors import from_tensors, to_tensors
from flowalign.training.workers.process import digest_tensors
from flowalign.utils.errors import ConfigError
from tests.fixtures.credit_rollouts import setting
from tests.fixtures.mortal_policy import order
from tests.fixtures.stopped_runs import metrics, state
from tests.fixtures.training import PROMPTS
from tests.fixtures.zygote import python

GROUPS = {
    "class_path": "flowalign.training.Matching",
    "init_args": {
        "data": {
            "class_path": "flowalign.training.matching.ScoredGroups",
            "init_args": {
                "prompts_per_step": 4,
                "weights": "old",
                "sampling": {
                    "num_steps": 4,
                    "samples_per_prompt": 4,
                    "micro_batch": 8,
                    "sde_window": {"class_path": "flowalign.sampling.NoSteps"},
                },
            },
        },
        "loss": {"class_path": "flowalign.losses.NFT"},
        "old": {"decay": {"highest": 0.5, "start": 0.5}, "per": "step"},
        "micro_batch": 8,
    },
}
PAIRS = {
    "class_path": "flowalign.training.Matching",
    "init_args": {
        "data": {
            "class_path": "flowalign.training.matching.Rollouts",
            "init_args": {
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "num_steps": 4,
                "micro_batch": 8,
            },
        },
        "loss": {"class_path": "flowalign.losses.DPO"},
        "micro_batch": 8,
    },
}
GRPO = {
    "class_path": "flowalign.training.PolicyGradient",
    "init_args": {
        "prompts_per_step": 4,
        "rollout_batch_prompts": 1,
        "updates_per_step": 2,
        "sampling": {
            "num_steps": 4,
            "samples_per_prompt": 4,
            "micro_batch": 3,
            "sde_window": {
                "class_path": "flowalign.sampling.Random",
                "init_args": {"size": 2, "low": 0, "high": 3},
            },
        },
        "credit": {"class_path": "flowalign.credit.Gain"},
        "micro_batch": 5,
    },
}
FIELDS = {"logp", "sigmas", "eta", "cond", "states", "finished"}


@pytest.fixture
def new_run(tmp_path, monkeypatch):
    """Write and load a run file on pixels; workers start without importing everything again."""
    monkeypatch.setattr(sys, "executable", python())
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))

    def build(name, recipe, *options, **workers):
        args = json.loads(json.dumps(recipe))
        place = args["init_args"].get("data", args)["init_args"]
        place["prompts"] = str(tmp_path / "prompts.txt")
        settings = {
            "policy": {
                "class_path": "tests.fixtures.mortal_policy.MortalPolicy",
                "init_args": {"orders": str(tmp_path / "orders")},
            },
            "recipe": args,
            "rewards": [{"class_path": "tests.fixtures.pixel.Redness", "weight": {"redness": 1}}],
            "num_steps": 4,
            "optimizer": {"learning_rate": 0.01},
            "checkpoints": {"every": 1, "keep": 9},
            "device": "cpu",
            "threads": 1,
            "output_dir": str(tmp_path / name),
            "rollouts": workers or None,
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(settings))
        return load(str(file), options)

    return build


def go(made, resume=None):
    return train(start(*made, lambda _: None, resume))


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_trajectories_survive_as_tensors():
    cfg, _, whole = setting(Gain())
    window, requests = cfg.rollouts.window(0), whole.requests[:: whole.group_size]
    named = to_tensors(cfg.rollouts, window, whole)
    assert {name.partition(".")[0] for name in named} == FIELDS
    again = from_tensors(cfg.rollouts, window, requests, named, torch.device("cpu"))
    assert to_tensors(cfg.rollouts, window, again).keys() == named.keys()
    for name, value in to_tensors(cfg.rollouts, window, again).items():
        assert value.equal(named[name]), name
    assert again.finished.keys() == whole.finished.keys()
    assert again.requests == whole.requests
    assert again.rows.source_row.equal(whole.rows.source_row)


def test_the_digest_covers_names_types_shapes_and_values():
    a = torch.arange(4.0)
    kinds = [{"a": a}, {"b": a}, {"a": a.double()}, {"a": a.view(2, 2)}, {"a": a + 1}, {}]
    assert len({digest_tensors(one) for one in kinds}) == len(kinds)
    assert digest_tensors({"a": a, "b": a}) == digest_tensors({"b": a.clone(), "a": a})


@pytest.mark.parametrize(
    ("recipe", "workers", "message"),
    [
        (GRPO, {"max_clipped": 2.0}, "rollouts.max_clipped"),
        (GROUPS, {"workers": 0}, "rollouts.workers"),
        (GROUPS, {"max_staleness": 2}, "max_staleness"),
        (GROUPS, {"workers": 2, "devices": ["cpu"]}, "for each of the 2 workers"),
        (GROUPS, {"devices": ["gpu"]}, "it must name `cpu` or `cuda:N`"),
    ],
)
def test_settings_that_do_not_work_are_refused_by_name(new_run, recipe, workers, message):
    with pytest.raises(ConfigError, match=message):
        new_run("a", recipe, **workers)


@pytest.mark.parametrize(
    ("file", "options", "what"),
    [
        ("shapes_draft", [], "recipe RewardGradient does not sample with them"),
        ("shapes_nft", ["--sharding.weights", "blocks"], "rollout workers load whole weights"),
    ],
)
def test_runs_that_sample_otherwise_refuse_workers(file, options, what):
    with pytest.raises(ConfigError, match=what):
        load(f"configs/{file}.yaml", ["--rollouts.workers", "1", *options])


def test_every_worker_has_a_prompt(new_run):
    run, _ = new_run("a", GROUPS, workers=3)
    assert "3 per process" in plan(run)["rollout workers"]
    with pytest.raises(ValueError, match=r"workers is 3, but .* samples 2 prompts per step"):
        plan(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "workers"), [(GROUPS, 1), (GRPO, 2), (PAIRS, 1)], ids=["groups", "grpo", "pairs"]
)
def test_workers_change_no_bit_even_if_one_is_killed_and_the_run_resumes(
    new_run, tmp_path, capsys, recipe, workers
):
    go(new_run("here", recipe))
    order(tmp_path / "orders", 2, "SIGKILL")
    there = new_run("there", recipe, workers=workers)
    go(new_run("there", recipe, "--num_steps", "2", workers=workers))
    assert capsys.readouterr().out.count("was lost and restarts with the same work") == 1
    go(there, resume=tmp_path / "there/checkpoints/step-000002")
    for step in (1, 2, 4):
        one, other = state(tmp_path / "here", step), state(tmp_path / "there", step)
        assert [name for name in one if not one[name].equal(other[name])] == []
    own = ("rollout/", "utilization/")
    sent = [
        {k: v for k, v in row.items() if not k.startswith(own)}
        for row in metrics(tmp_path / "there")
    ]
    assert sent == metrics(tmp_path / "here")


@pytest.mark.slow
def test_a_stale_step_is_sampled_by_the_weights_before_the_last_update(new_run, tmp_path):
    go(new_run("still", GROUPS, "--optimizer.learning_rate", "1e-7", "--num_steps", "2"))
    go(new_run("stale", GROUPS, workers=2, max_staleness=1))
    go(new_run("fresh", GROUPS, "--recipe.data.rollout_batch_prompts", "2"))
    still, stale, fresh = (read(tmp_path / name) for name in ("still", "stale", "fresh"))
    assert [row["rollout/staleness"] for row in stale] == [0, 1, 1, 1]
    assert [row["rollout/weight_version"] for row in stale] == [0, 0, 1, 2]
    assert still[1]["reward_mean"] == pytest.approx(stale[1]["reward_mean"], abs=1e-6)
    assert abs(fresh[1]["reward_mean"] - stale[1]["reward_mean"]) > 1e-5
    assert stale[0]["cost/network_evaluations"] == fresh[0]["cost/network_evaluations"]
    assert "Utilization" in (tmp_path / "stale/report.html").read_text()
    for row in stale[1:]:
        assert 0 <= row["utilization/trainer"] <= 1
        assert 0 < row["utilization/workers"] <= 1


@pytest.mark.slow
def test_stale_ratios_are_recomputed_and_refused_above_a_limit(new_run, tmp_path):
    options = "--num_steps", "2", "--optimizer.learning_rate", "0.05"
    go(new_run("stale", GRPO, *options, workers=1, max_staleness=1, max_clipped=1.0))
    fresh, stale = read(tmp_path / "stale")
    assert (stale["rollout/staleness"], "rollout/ratio_clipped" in fresh) == (1, False)
    assert 0 < stale["rollout/ratio_clipped"] <= 1
    assert stale["clip_frac_high"] + stale["clip_frac_low"] < stale["rollout/ratio_clipped"]
    made = new_run("ended", GRPO, *options, workers=1, max_staleness=1, max_clipped=0.0)
    with pytest.raises(TrainingFailure, match=r"of the transitions .* Set rollouts.max_staleness"):
        go(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("SIGSTOP", "lost, and rollouts.restarts are used up: it did not answer within 1 s"),
        ("SIGKILL", "lost, and rollouts.restarts are used up: it ended by SIGKILL"),
        ("ERROR", "failed: it ended with code 1\n.*the model broke"),
    ],
)
def test_a_run_that_loses_its_worker_ends_with_one_message_and_keeps_its_checkpoints(
    new_run, tmp_path, what, message
):
    order(tmp_path / "orders", 2, what)
    made = new_run("run", GROUPS, workers=1, timeout=1.0, restarts=0)
    with pytest.raises(TrainingFailure, match=f"(?s)rollout worker 1 of 1 (was )?{message}"):
        go(made)
    assert (tmp_path / "run/checkpoints/step-000001/manifest.json").is_file()

"""From images to preferences to a reward model to scores to agreement to a run, by commands."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.fixtures.zygote import python

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def command(*words):
    done = subprocess.run(
        [python(), *map(str, words)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_preferences_become_a_reward_that_agrees_and_can_be_optimised(tmp_path):
    data, model = tmp_path / "preferences", tmp_path / "reward"
    few = ("--limit", "120", "--count", "3", "--steps", "4")
    command("assets/shapes/preferences.py", data, *few)
    train = ("-m", "flowalign", "reward", "train", "configs/reward/shapes_preference.yaml")
    command(
        *train,
        "--data",
        json.dumps([{"path": str(data / "train.jsonl")}]),
        "--output_dir",
        model,
        "--embeddings",
        tmp_path / "features",
        "--schedule.epochs",
        "12",
        "--test",
        "0.0",
    )
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text(
        "rewards:\n- class_path: reward_models.TrainedReward\n"
        f"  init_args: {{path: {model / 'model'}, device: cpu, prefix: learned_}}\n"
    )
    scores = tmp_path / "scores"
    command("-m", "flowalign", "score", data / "test.jsonl", "--rewards", rewards, "--out", scores)
    summary = json.loads((scores / "summary.json").read_text())
    assert (summary["rows"], summary["failed"]) == (3 * 240, 0)
    command("-m", "flowalign", "reward", "eval", scores, "--bootstrap", "0")
    agreement = {
        result["score"]: result["measures"]["accuracy_without_ties"]
        for result in json.loads((scores / "eval.json").read_text())["results"]
        if result["score"] == "learned_" + result["human"].removeprefix("rank/")
    }
    assert len(agreement) == 5
    for dim in ("learned_colour", "learned_count", "learned_position"):
        found = agreement[dim]
        assert found["value"] > 0.5 + 3 * 0.5 / found["n"] ** 0.5, (dim, found)
    run, verifier = tmp_path / "run", {"class_path": "reward_models.ShapesVerifier"}
    learned = yaml.safe_load(rewards.read_text())["rewards"][0]
    both = [learned | {"weight": {"learned_colour": 1.0}}, verifier]
    command(
        "-m",
        "flowalign",
        "train",
        "configs/shapes_learned.yaml",
        "--num_steps",
        "1",
        "--recipe.prompts_per_step",
        "4",
        "--output_dir",
        run,
        "--evaluation.num_prompts",
        "16",
        "--rewards",
        json.dumps(both),
    )
    after = json.loads((run / "summary.json").read_text())["after"]
    assert {"learned_colour", "colour", "exact_match"} <= set(after)

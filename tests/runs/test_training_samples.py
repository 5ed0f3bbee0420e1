"""Samples during training: their files, the report, and a run that they do not change."""

import json

import pytest

from flowalign.runs.config import load
from flowalign.utils.tracking import read_metrics
from tests.fixtures.stopped_runs import train_here

BARE = ("--evaluation", "null", "--num_steps", "4")


@pytest.mark.slow
def test_a_run_without_evaluation_shows_samples_and_trains_as_without_them(tmp_path, caplog):
    shown, plain = tmp_path / "shown", tmp_path / "plain"
    train_here(shown, *BARE, "--samples.every", "2", "--samples.num_prompts", "3")
    train_here(plain, *BARE)
    index = json.loads((shown / "training_samples/index.json").read_text())
    assert (index["steps"], len(index["prompts"])) == ([2, 4], 3)
    assert (shown / "training_samples/step-000004.png").is_file()
    page = (shown / "report.html").read_text()
    assert index["prompts"][0] in page
    assert not (plain / "training_samples").exists()
    one, other = (
        [[row[name] for name in ("reward_mean", "optim/grad_norm")] for row in read_metrics(folder)]
        for folder in (shown, plain)
    )
    assert one == other
    costs = [json.loads((f / "summary.json").read_text())["reward_calls"] for f in (shown, plain)]
    assert costs[0] == costs[1]
    assert "open an issue" not in caplog.text


def test_samples_need_prompts(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a", "chosen": "a.png", "rejected": "b.png"}\n')
    settings = [f"recipe.data.path={data}", "recipe.data.held_out=null", "samples.every=2"]
    with pytest.raises(ValueError, match=r"samples\.prompts is null, and the recipe has no prompt"):
        load(["configs/preference/shapes/dpo.yaml"], settings)

"""Files of an evaluation in addition to its means, and the train command's notes on a run."""

import json
from dataclasses import replace

import pytest
import torch
import yaml

from flowalign.distributed.processes import ALONE
from flowalign.sampling.reward_guidance import FlowNRG
from flowalign.training.divergence import BASE
from flowalign.training.held_out_evaluation import Evaluation, evaluate, save_grid
from flowalign.types import prompts_of
from tests.fixtures.commands import exit_code
from tests.fixtures.latent import LatentRedness
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import new_rewards


@pytest.fixture
def cfg(tmp_path):
    for split, prompts in (("seen", "a\nbb\nccc"), ("unseen", "dddd")):
        (tmp_path / f"{split}.txt").write_text(prompts)
    files = {split: str(tmp_path / f"{split}.txt") for split in ("seen", "unseen")}
    return Evaluation(prompts=files, num_prompts=8, num_steps=2, micro_batch=3, grid=4)


def test_the_scores_of_all_samples_are_those_of_the_means_and_of_the_pictures(cfg, tmp_path):
    """An image is one pixel, so the grid determines its scores."""
    found = evaluate(PixelPolicy(), new_rewards(), cfg, ALONE)
    save_grid(tmp_path, 3, found)
    content = json.loads((tmp_path / "samples" / "step-000003.json").read_text())
    rows = content["samples"]
    assert content["dims"] == ["redness", "green"]
    assert [row["split"] for row in rows] == ["seen"] * 4 + ["unseen"] * 4
    assert [row["prompt"] for row in rows] == ["a", "bb", "ccc", "a"] + ["dddd"] * 4
    scores = torch.tensor([row["scores"][0] for row in rows])
    assert found.metrics["eval/redness"] == pytest.approx(float(scores.mean()))
    assert found.metrics["eval/unseen/redness"] == pytest.approx(float(scores[4:].mean()))
    assert [rows[i]["prompt"] for i in content["shown"]] == prompts_of(found.grid_requests)
    reds = new_rewards().models[0].score(new_rewards().batch(found.grid, found.grid_requests))
    assert torch.allclose(scores[content["shown"]], reds.values[:, 0], atol=1e-6)


def test_an_evaluation_is_guided_by_its_latent_reward(cfg):
    guidance = FlowNRG(reward=LatentRedness(), weights={"redness": 1.0}, scale=4.0)
    plain, guided = (
        evaluate(PixelPolicy(), new_rewards(), each, ALONE).metrics["eval/redness"]
        for each in (cfg, replace(cfg, reward_guidance=guidance))
    )
    assert guided > plain + 0.1


@pytest.fixture
def run_file(tmp_path, cfg):
    prompts = str(tmp_path / "seen.txt")
    content = {
        "policy": {"class_path": "tests.fixtures.pixel.PixelPolicy"},
        "num_steps": 2,
        "recipe": {
            "class_path": "flowalign.training.PolicyGradient",
            "init_args": {
                "prompts": prompts,
                "prompts_per_step": 2,
                "sampling": {"num_steps": 4, "samples_per_prompt": 4, "eta": 0.8},
                "algorithm": {"class_path": "flowalign.losses.GRPO"},
            },
        },
        "rewards": [{"class_path": "tests.fixtures.pixel.Redness", "weight": {"redness": 1.0}}],
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"prompts": {"all": prompts}, "num_prompts": 3, "num_steps": 2},
        "checkpoints": {"every": 1},
        "device": "cpu",
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_a_run_keeps_the_commands_that_trained_it_and_its_report_shows_them(run_file):
    assert exit_code("train", run_file, "--num_steps", 1) == 0
    folder = run_file.parent / "run"
    assert (folder / "commands.txt").read_text() == f"flowalign train {run_file} --num_steps 1\n"
    assert exit_code("train", run_file) == 2
    assert exit_code("train", run_file, "--resume") == 0
    commands = (folder / "commands.txt").read_text().splitlines()
    assert commands[1:] == [f"flowalign train {run_file} --resume"]
    page = (folder / "report.html").read_text()
    assert "\n".join(commands) in page
    assert "Lowest at the end" in page
    assert not (folder / "failure.txt").exists()


@pytest.mark.slow
def test_a_run_that_fails_says_why_in_its_folder(run_file, monkeypatch):
    def disk_is_full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("flowalign.runs.train_session.save_grid", disk_is_full)
    assert exit_code("train", run_file) == 1
    assert (run_file.parent / "run" / "failure.txt").read_text() == "no space left on device\n"


@pytest.mark.slow
def test_the_report_is_written_at_each_evaluation(run_file, monkeypatch):
    written = []

    def write(folder, running=False, rows=None):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert rows is None or rows == [json.loads(line) for line in lines]
        written.append((running, len(lines)))

    monkeypatch.setattr("flowalign.runs.train_session.write_report", write)
    assert exit_code("train", run_file, "--num_steps", 2, "--evaluation.every", 1) == 0
    assert [running for running, _ in written] == [True, True, True, False]
    assert [lines for _, lines in written] == sorted(lines for _, lines in written)


@pytest.mark.slow
def test_a_run_measures_its_distance_also_after_it_was_resumed(tmp_path, run_file, capsys):
    folder = tmp_path / "run"
    assert exit_code("train", str(run_file), "--num_steps", "1") == 0
    assert (folder / BASE).is_file()
    assert json.loads((folder / "summary.json").read_text())["before"]["pixel_distance"] == 0
    assert exit_code("train", str(run_file), "--resume") == 0
    after = json.loads((folder / "summary.json").read_text())["after"]["pixel_distance"]
    assert after > 0
    weights = folder / "checkpoints" / "step-000002"
    assert exit_code("eval", run_file, "--distance") == 2
    capsys.readouterr()
    assert exit_code("eval", run_file, "--weights", weights, "--distance") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["eval/pixel_distance"] == pytest.approx(after, rel=1e-6)

"""A kind of training that flowalign has never heard of is one file, named in a run file."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.fixtures.commands import exit_code

RECIPE = '''
"""Regress the velocity on one clean latent: fine-tuning in its shortest form."""

from dataclasses import dataclass

import torch

from flowalign.training import Loop, MemoryPart, Recipe, RecipePlan
from flowalign.types import Request


@dataclass(frozen=True, kw_only=True)
class Fit(Recipe):
    """Learn to generate one latent."""

    target: list[float]
    batch_size: int = 4
    micro_batch: int = 4
    on_failed_reward: str = "raise"

    prompt_files = ()
    updates = 1
    sampler = None

    @property
    def examples_per_step(self):
        return self.batch_size

    def check(self, run):
        if self.batch_size < 1:
            raise ValueError(f"recipe.batch_size is {self.batch_size}; it must be at least 1")

    def plan(self, run, model, world):
        rows = {"latents per step": str(self.batch_size)}
        return RecipePlan(rows=rows, parts=[MemoryPart("latents", 4 * self.batch_size * 3)])

    def open(self, run, learner, folder, log):
        log("fitting one latent")
        return FitLoop(self, learner, run.seed)


class FitLoop(Loop):
    def __init__(self, cfg, learner, seed):
        self.cfg, self.learner, self.seed, self.seen = cfg, learner, seed, 0

    def run(self, steps):
        policy = self.learner.policy
        cond = policy.encode([Request("a")] * self.cfg.batch_size)
        for step in steps:
            noise = policy.noise(self.cfg.batch_size, torch.Generator().manual_seed(step))
            clean = torch.tensor(self.cfg.target).expand_as(noise)
            x = 0.3 * clean + 0.7 * noise
            error = policy.velocity(x, torch.tensor(0.7), cond) - (noise - clean)
            loss = error.square().mean()
            self.learner.backward(loss)
            self.seen += self.cfg.batch_size
            yield {"policy_loss": float(loss.detach()), "latents": self.seen} | self.learner.step()

    def evaluate(self):
        return {"eval/latents": float(self.seen)}

    def draw(self):
        return 0.0

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]
'''


@pytest.fixture
def run_file(tmp_path, monkeypatch) -> Path:
    """A run file of six steps with its recipe in a file next to it."""
    (tmp_path / "my_training.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    content = {
        "policy": {"class_path": "tests.fixtures.pixel.PixelPolicy"},
        "num_steps": 6,
        "recipe": {"class_path": "my_training.Fit", "init_args": {"target": [1.0, -2.0, 0.5]}},
        "rewards": [{"class_path": "tests.fixtures.pixel.Redness", "weight": {"redness": 1.0}}],
        "optimizer": {"learning_rate": 0.05},
        "evaluation": {"prompts": {"all": str(tmp_path / "prompts.txt")}, "num_prompts": 2},
        "checkpoints": {"every": 2},
        "device": "cpu",
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "prompts.txt").write_text("a\nbb\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    yield tmp_path / "run.yaml"
    sys.modules.pop("my_training", None)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["policy_loss"] for row in rows if "policy_loss" in row]


def test_a_recipe_of_ones_own_is_planned_trained_and_evaluated(run_file, capsys):
    assert exit_code("check", run_file) == 0
    assert "latents: " in capsys.readouterr().out
    assert exit_code("train", run_file) == 0
    folder = run_file.parent / "run"
    found = losses(folder)
    assert len(found) == 6
    assert found[-1] < 0.8 * found[0]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["before"]["latents"], summary["after"]["latents"]) == (0, 24)
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_a_recipe_of_ones_own_resumes_with_the_state_of_its_loop(run_file):
    folder = run_file.parent / "run"
    assert exit_code("train", run_file, "--num_steps", 4) == 0
    assert exit_code("train", run_file, "--resume") == 0
    other = run_file.parent / "straight"
    assert exit_code("train", run_file, "--output_dir", other) == 0
    assert losses(folder)[:4] == losses(other)[:4]
    states = [
        json.loads((f / "checkpoints" / "step-000006" / "state" / "loop.json").read_text())
        for f in (folder, other)
    ]
    assert [state["loop"] for state in states] == [{"seen": 24}] * 2


def test_settings_of_ones_own_recipe_are_checked_like_all_others(run_file, capsys):
    assert exit_code("check", run_file, "--recipe.batch_size", 0) == 2
    assert "recipe.batch_size is 0; it must be at least 1" in capsys.readouterr().err
    assert exit_code("check", run_file, "--recipe.bach_size", 3) == 2
    assert "batch_size" in capsys.readouterr().err

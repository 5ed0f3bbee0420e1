"""Two real processes, on the embedded model."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign import runs
from flowalign.runs.config import Run, load
from tests.fixtures.processes import Watched
from tests.fixtures.zygote import python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores"),
]
TRAIN = ["-m", "flowalign", "train"]


def written_run(folder: Path) -> tuple[Run, str]:
    """A short run, and the text of its file."""
    overrides = [
        "num_steps=2",
        "recipe.prompts_per_step=3",
        "recipe.sampling.num_steps=4",
        "recipe.sampling.samples_per_prompt=4",
        "recipe.sampling.micro_batch=64",
        "recipe.micro_batch=64",
        "evaluation=null",
        "checkpoints.verify=never",
        "optimizer.eps=1.0e-3",
        "optimizer.learning_rate=1.0e-2",
        f"output_dir={folder}",
    ]
    return load("configs/shapes.yaml", overrides)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    state = load_file(folder / "checkpoints" / "step-000002" / "state" / "training.safetensors")
    assert yaml.safe_load((folder / "config.yaml").read_text())["num_steps"] == 2
    return {name: value for name, value in state.items() if name.startswith("parameter.")}


def test_two_processes_make_the_same_updates_as_one(tmp_path):
    run, text = written_run(tmp_path / "one")
    assert runs.train(runs.start(run, text, lambda _: None))["status"] == "finished"
    config = tmp_path / "two.yaml"
    config.write_text(written_run(tmp_path / "two")[1])
    command = [python(), *TRAIN, str(config), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = parameters(tmp_path / "one"), parameters(tmp_path / "two")
    moved = max(float(value.abs().max()) for name, value in one.items() if "lora_B" in name)
    assert moved > 1e-5, "nothing was trained, so the comparison would be empty"
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=0, msg=name)


def test_a_mistake_that_only_weights_reveal_is_told_once(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "readme.txt").touch()
    wrong = ["--processes", "2", "--weights", str(tmp_path / "none")]
    command = [python(), "-m", "flowalign", "eval", "configs/shapes.yaml", *wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"{tmp_path / 'none'}" in done.stderr


def test_trainings_end_with_a_launcher_that_is_killed(tmp_path):
    watched = Watched(tmp_path)
    (tmp_path / "watched_prompts.py").write_text(WATCHED.format(watched=watched.source))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    rewards = "[{class_path: watched_prompts.Watching, weight: 1.0}]"
    changes = [f"rewards={rewards}", f"output_dir={tmp_path / 'run'}"]
    command = [python(), *TRAIN, "configs/shapes.yaml", *changes, "--processes", "2"]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    watched.wait_for(2)
    started.kill()
    watched.wait_for_the_end()
    started.wait()


WATCHED = """
from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec

class Watching(RewardModel, Loadable):
    def __init__(self) -> None:
        self.spec = RewardSpec("one", ("one",), "any", (0.0, 1.0), "Apache-2.0")

    def load(self) -> None:
        global alive
        {watched}

    def score(self, batch: MediaBatch) -> RewardOutput:
        return RewardOutput.build(self.spec, batch.media.mean((1, 2, 3, 4))[:, None])
"""
"""A reward model by which a training is watched from the moment it loads it."""

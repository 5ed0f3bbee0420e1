"""Two real processes under torchrun, on the embedded model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign.runs.config import load

pytestmark = pytest.mark.slow


def train(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    overrides = [
        "num_steps=3",
        "recipe.prompts_per_step=3",
        "recipe.sampling.samples_per_prompt=6",
        "recipe.sampling.micro_batch=64",
        "recipe.micro_batch=64",
        "evaluation.num_prompts=4",
        "optimizer.eps=1.0e-3",
        "optimizer.learning_rate=1.0e-2",
        f"output_dir={folder}",
    ]
    _, text = load("configs/shapes.yaml", overrides)
    config = folder.with_suffix(".yaml")
    config.write_text(text)
    command = [sys.executable, "-m", "flowalign", "train", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    state = load_file(folder / "checkpoints" / "step-000003" / "state" / "training.safetensors")
    assert yaml.safe_load((folder / "config.yaml").read_text())["num_steps"] == 3
    return {name: value for name, value in state.items() if name.startswith("parameter.")}


def test_two_processes_make_the_same_updates_as_one(tmp_path):
    one = train(tmp_path / "one")
    two = train(tmp_path / "two", "--processes", "2")
    moved = max(float(value.abs().max()) for name, value in one.items() if "lora_B" in name)
    assert moved > 1e-5, "nothing was trained, so the comparison would be empty"
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=0, msg=name)

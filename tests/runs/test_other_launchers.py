"""Runs that torchrun and `accelerate launch` start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign.training import checkpoint
from tests.fixtures.stopped_runs import SMALL, free_port, wait_for_steps
from tests.fixtures.zygote import python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
PLAIN = ["--mixed_precision", "no", "--dynamo_backend", "no"]


def launcher(name: str) -> list[str]:
    """The command that starts two processes together."""
    accelerated = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", *PLAIN]
    return {
        "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", "2"],
        "accelerate": [*ACCELERATE, *accelerated, "--main_process_port", str(free_port())],
        "one process": [python()],
    }[name]


def start(name: str, folder: Path, **changes: object) -> subprocess.Popen:
    """The small run, its weights shared, so that both processes must compute it."""
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(SMALL | {"sharding": {"weights": "blocks"}} | changes))
    command = ["-m", "flowalign", "train", str(file), "--output_dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": python()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*launcher(name), *command], env=environment, **pipes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, torch.Tensor]:
    return finished("one process", tmp_path_factory.mktemp("one") / "run")


def finished(name: str, folder: Path) -> dict[str, torch.Tensor]:
    process = start(name, folder, num_steps=2)
    said = process.communicate(timeout=500)[0]
    assert process.returncode == 0, said[-3000:]
    saved = checkpoint.latest(folder / "checkpoints")
    assert saved is not None
    assert yaml.safe_load((folder / "summary.json").read_text())["processes"] == (
        1 if name == "one process" else 2
    )
    return load_file(saved / "state/training.safetensors")


def test_processes_of_accelerate_train_together_as_one_trains(tmp_path, alone):
    found = finished("accelerate", tmp_path / "run")
    moved = [n for n in found if n.startswith("parameter") and "lora_B" in n]
    assert max(float(found[n].abs().max()) for n in moved) > 1e-6, "nothing was trained"
    for key in moved:  # Adam's first steps turn roundings of tiny gradients into steps
        torch.testing.assert_close(found[key], alone[key], atol=1e-5, rtol=0, msg=key)


def test_sigterm_to_torchrun_saves_and_stops(tmp_path):
    process = start("torchrun", tmp_path / "run", num_steps=1000, checkpoints={"every": 1000})
    wait_for_steps(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=500)[0]
    assert process.returncode != 0
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None, said[-3000:]
    checkpoint.check_complete(saved)

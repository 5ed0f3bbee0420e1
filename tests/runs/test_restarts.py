"""Runs of several processes that are killed: they restart or resume, and end with the same bits."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from flowalign.training import checkpoint
from tests.fixtures.stopped_runs import (
    assert_same_run,
    finish,
    free_port,
    start,
    wait_for,
    workers,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores"),
]
STEPS = 5
MANY = "FLOWALIGN_TRIALS"
"""Environment variable with the number of kills of each kind, after different steps."""
TRIALS = pytest.mark.parametrize("trial", range(int(os.environ.get(MANY, "1"))))
OPTIONS = "--num_steps", STEPS, "--evaluation", "null", "--processes", 2


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run of two processes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    finish(start(folder, *OPTIONS))
    return folder


def killed(folder: Path, launcher: subprocess.Popen, pid: int, trial: int) -> None:
    """Kill a process of a run after its second or third step."""
    wait_for(folder / "checkpoints" / f"step-{2 + trial % 2:06d}", launcher)
    os.kill(pid, signal.SIGKILL)


@TRIALS
def test_a_killed_process_is_restarted_and_ends_with_the_same_bits(tmp_path, straight, trial):
    folder = tmp_path / "run"
    launcher = start(folder, *OPTIONS, "--restarts", 1)
    wait_for(folder / "checkpoints" / "step-000001", launcher)
    killed(folder, launcher, workers(launcher)[trial % 2], trial)
    output = finish(launcher)
    assert output.count("was ended by SIGKILL") == output.count("flowalign: restart 1 of 1") == 1
    assert output.count("Traceback") == 0
    assert_same_run(straight, folder, STEPS)


@TRIALS
def test_a_killed_launcher_leaves_what_a_later_one_resumes(tmp_path, straight, trial):
    folder = tmp_path / "run"
    launcher = start(folder, *OPTIONS)
    killed(folder, launcher, launcher.pid, trial)
    finish(launcher, -signal.SIGKILL)
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    checkpoint.check_complete(newest)
    finish(start(folder, *OPTIONS, "--resume"))
    assert_same_run(straight, folder, STEPS)


def test_two_machines_train_as_two_processes_of_one(tmp_path, straight):
    folder = tmp_path / "run"
    meeting = "--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}", "--processes", 1
    launchers = [start(folder, *OPTIONS[:-2], *meeting) for _ in range(2)]
    for launcher in launchers:
        finish(launcher)
    assert_same_run(straight, folder, STEPS)


@TRIALS
def test_a_killed_ray_worker_is_restarted_and_ends_with_the_same_bits(tmp_path, straight, trial):
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    command = start(folder, *OPTIONS, "--executor", "ray", "--restarts", 1)
    wait_for(folder / "checkpoints" / "step-000001", command)
    holder = (folder / "run.lock").read_text()
    killed(folder, command, int(re.match(r"process (\d+) ", holder)[1]), trial)
    output = finish(command)
    assert output.count("flowalign: restart 1 of 1") == 1
    assert output.count("Traceback") == 0
    assert_same_run(straight, folder, STEPS)


def test_a_ray_worker_stops_and_saves_after_the_step(tmp_path):
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    options = "--num_steps", 1000, "--evaluation", "null", "--executor", "ray", "--restarts", 9
    command = start(folder, *options)
    wait_for(folder / "checkpoints" / "step-000001", command)
    command.send_signal(signal.SIGTERM)
    output = finish(command, 143)
    told = json.loads((folder / "summary.json").read_text())
    assert told["status"] == "interrupted", output
    assert "restart" not in output
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    checkpoint.check_complete(newest)

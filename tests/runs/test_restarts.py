"""Runs of several processes that are killed: they restart or resume, and end with the same bits."""

import copy
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from flowalign.training import checkpoint
from tests.fixtures.ray_nodes import two_machines
from tests.fixtures.stopped_runs import (
    PIXELS,
    assert_same_run,
    finish,
    free_port,
    start,
    wait_for,
    wait_for_port,
    workers,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores"),
]
STEPS = PIXELS["num_steps"]
MANY = "FLOWALIGN_TRIALS"
"""Environment variable with the number of kills of each kind, after different steps."""
TRIALS = pytest.mark.parametrize("trial", range(int(os.environ.get(MANY, "1"))))


HELD = 8
"""Step after which a held run waits for the file `gate` beside its folder."""


def begin(
    folder: Path, *options: object, processes: int = 2, held: bool = False
) -> subprocess.Popen:
    run = copy.deepcopy(PIXELS)
    if held:
        gate = folder.parent / "gate"
        run["rewards"][0]["init_args"] = {"checkpoint": str(step(folder, HELD)), "gate": str(gate)}
    return start(folder, "--processes", processes, *options, run=run)


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:06d}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run of two processes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    finish(begin(folder))
    return folder


@pytest.fixture(scope="module")
def machines():
    with two_machines() as made:
        yield made


def wait_for_step(folder: Path, number: int, launcher: subprocess.Popen) -> None:
    wait_for(step(folder, number), launcher)


def newest(folder: Path) -> int:
    """Number of steps of the newest checkpoint, which is complete."""
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    checkpoint.check_complete(found)
    return int(found.name.partition("-")[2])


@TRIALS
def test_a_killed_process_is_restarted_and_ends_with_the_same_bits(tmp_path, straight, trial):
    folder = tmp_path / "run"
    launcher = begin(folder, "--restarts", 1)
    wait_for_step(folder, 2 + trial % 2, launcher)
    os.kill(workers(launcher)[trial % 2], signal.SIGKILL)
    output = finish(launcher)
    assert output.count("failed (exitcode: -9)") == output.count("flowalign: restart 1 of 1") == 1
    assert output.count("Traceback") == 0
    assert_same_run(straight, folder, STEPS)


@TRIALS
def test_a_killed_launcher_leaves_what_a_later_one_resumes(tmp_path, straight, trial):
    folder = tmp_path / "run"
    launcher = begin(folder)
    wait_for_step(folder, 2 + trial % 2, launcher)
    os.kill(launcher.pid, signal.SIGKILL)
    finish(launcher, -signal.SIGKILL)
    assert newest(folder) >= 2
    finish(begin(folder, "--resume"))
    assert_same_run(straight, folder, STEPS)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk needs rights")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@TRIALS
def test_a_full_disk_ends_all_processes_and_loses_no_state(small_disk, straight, trial):
    folder = small_disk / "run"
    launcher = begin(folder)
    wait_for_step(folder, 2 + trial, launcher)
    filler = small_disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True)
    output = finish(launcher, 1)
    assert output.count("No space left on device") == 1, output
    assert output.count("Traceback") == 0
    assert newest(folder) >= 2 + trial
    filler.unlink()
    finish(begin(folder, "--resume"))
    assert_same_run(straight, folder, STEPS)


def test_two_machines_train_as_one_does_though_one_is_lost_and_replaced(tmp_path, straight):
    folder, port = tmp_path / "run", free_port()
    machine = "--nodes", 2, "--rendezvous", f"127.0.0.1:{port}", "--restarts", 1
    host = begin(folder, *machine, processes=1)
    wait_for_port(port)
    lost = begin(folder, *machine, processes=1)
    wait_for_step(folder, 2, host)
    os.kill(lost.pid, signal.SIGKILL)
    finish(lost, -signal.SIGKILL)
    new = begin(folder, *machine, "--resume", processes=1)
    assert finish(host).count("flowalign: restart 1 of 1") == 1
    finish(new)
    assert_same_run(straight, folder, STEPS)


def holder(folder: Path) -> str:
    """Number of the process that trains the run, or that did so last."""
    found = re.match(r"process (\d+) ", (folder / "run.lock").read_text())
    return found[1] if found else ""


@TRIALS
def test_a_killed_ray_worker_and_a_killed_machine_change_no_bit(
    tmp_path, straight, machines, trial
):
    folder = tmp_path / "run"
    ray = "--executor", "ray", "--address", machines.address
    command = begin(folder, *ray, "--restarts", 2, held=True)
    wait_for_step(folder, 2 + trial % 2, command)
    first = holder(folder)
    os.kill(int(first), signal.SIGKILL)
    while holder(folder) in ("", first):
        assert command.poll() is None, command.communicate()[0]
        time.sleep(0.02)
    wait_for_step(folder, HELD, command)
    machines.kill_second()
    (tmp_path / "gate").touch()
    output = finish(command)
    for restart in (1, 2):
        assert output.count(f"flowalign: restart {restart} of 2") == 1
    assert output.count("Traceback") == 0
    assert_same_run(straight, folder, STEPS)


def test_a_ray_worker_of_a_new_cluster_stops_and_saves_after_the_step(tmp_path):
    """Without --address, Ray starts for the command and ends with it."""
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    ray = "--executor", "ray", "--num_steps", 1000, "--restarts", 9
    command = begin(folder, *ray, processes=1)
    wait_for_step(folder, 1, command)
    command.send_signal(signal.SIGTERM)
    output = finish(command, 143)
    told = json.loads((folder / "summary.json").read_text())
    assert told["status"] == "interrupted", output
    assert "flowalign: restart" not in output
    assert newest(folder) >= 1

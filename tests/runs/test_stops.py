"""Runs in separate processes that are stopped, killed, and started twice."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flowalign.training import checkpoint
from tests.fixtures.stopped_runs import (
    PIXELS,
    assert_same_run,
    finish,
    start,
    steps_logged,
    train_here,
    wait_for,
    wait_for_steps,
    workers,
)
from tests.fixtures.zygote import python

pytestmark = pytest.mark.slow

MANY = "FLOWALIGN_KILLS"
"""Environment variable with the number of stops of each kind at random moments, of one process and
of two; without it, a few of one process."""
KILLS = int(os.environ.get(MANY, "2"))
SEED = int(os.environ.get("FLOWALIGN_KILLS_SEED", random.randrange(10**6)))
STEPS = 8 + 2 * KILLS
LONG = (
    *("--num_steps", STEPS, "--evaluation.every", 3, "--evaluation.num_prompts", 2),
    *("--evaluation.num_steps", 2),
    *("--evaluation.prompts", '{"held": "assets/shapes/prompts/train.txt"}'),
)


def begin(folder: Path, *options: object) -> subprocess.Popen:
    """Start a run on pixels that saves after its last step, or when it is stopped."""
    return start(folder, "--checkpoints.every", 100, *options, run=PIXELS)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Callable[[int], Path]:
    """A function that returns the folder of a long run that nothing stopped."""
    root, done = tmp_path_factory.mktemp("straight"), set()

    def run(processes: int) -> Path:
        if processes not in done:
            train_here(root / str(processes), *LONG, "--processes", processes, run=PIXELS)
            done.add(processes)
        return root / str(processes)

    return run


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_killed_process_resumes_to_the_bits_of_an_uninterrupted_one(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train_here(straight)
    process = start(killed)
    wait_for(killed / "checkpoints" / "step-000003", process)
    process.send_signal(signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert not (killed / "summary.json").exists()
    train_here(killed, "--resume")
    assert_same_run(straight, killed, 8)
    assert summary(killed)["steps"] == 8


def stopped_at(folder: Path, code: int, output: str) -> int:
    """Number of steps of a run that was stopped and saved after the step in progress."""
    assert "--resume" in output
    told = summary(folder)
    assert told["status"] == "interrupted"
    assert told["stopped_by"] == signal.Signals(code - 128).name
    assert 1 <= told["steps"] < PIXELS["num_steps"]
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest.name == f"step-{told['steps']:06d}"
    checkpoint.check_complete(newest)
    return told["steps"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_a_stop_saves_after_the_step_in_progress_and_exits_as_shells_expect(tmp_path, number, code):
    folder = tmp_path / "run"
    process = begin(folder)
    wait_for_steps(folder, 1, process)
    process.send_signal(number)
    stopped_at(folder, code, finish(process, code))


def test_ctrl_c_prints_the_command_that_continues_with_the_same_processes(tmp_path):
    """The newcomer on a cluster copies the printed command."""
    folder = tmp_path / "run"
    process = begin(folder, "--processes", 2)
    wait_for_steps(folder, 1, process)
    for pid in (process.pid, *workers(process)):  # a terminal sends it to all of them
        os.kill(pid, signal.SIGINT)
    output = finish(process, 130)
    done = stopped_at(folder, 130, output)
    printed = re.search(
        r"continue with: flowalign (train .* --resume --processes 2)$", output, re.M
    )
    assert printed, output
    command = [python(), "-m", "flowalign", *shlex.split(printed[1])]
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"after {done} steps" in again.stdout + again.stderr
    assert summary(folder)["status"] == "finished"


def test_a_run_that_failed_in_its_first_step_is_repeated_as_it_was(tmp_path, capsys):
    broken = (
        "--rewards",
        '[{"class_path": "tests.fixtures.stopped_runs.Broken", "weight": {"redness": 1}}]',
    )
    train_here(tmp_path / "run", *broken, code=1, run=PIXELS)
    assert (tmp_path / "run/failure.txt").exists()
    (tmp_path / "run/left.txt").touch()
    train_here(tmp_path / "run", "--num_steps", 1, run=PIXELS)
    assert summary(tmp_path / "run")["steps"] == 1
    assert not (tmp_path / "run/failure.txt").exists()
    assert not (tmp_path / "run/left.txt").exists()
    train_here(tmp_path / "run", code=2, run=PIXELS)
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "number", "code"),
    [
        ("launcher", signal.SIGTERM, 143),
        ("worker", signal.SIGTERM, 143),
        ("launcher", signal.SIGUSR1, 138),  # of sbatch
    ],
)
def test_a_signal_to_any_process_stops_all_after_the_same_step(tmp_path, target, number, code):
    folder = tmp_path / "run"
    process = begin(folder, "--processes", 2)
    wait_for_steps(folder, 1, process)
    os.kill(process.pid if target == "launcher" else workers(process)[-1], number)
    output = finish(process, code)
    assert stopped_at(folder, code, output) == steps_logged(folder)
    assert "Traceback" not in output


def test_sigterm_sent_twice_by_launcher_and_scheduler_still_saves(tmp_path):
    folder = tmp_path / "run"
    process = begin(folder)
    wait_for_steps(folder, 1, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    stopped_at(folder, 143, finish(process, 143))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_run_in_the_same_directory_is_refused_by_the_name_of_the_first(
    tmp_path, processes, capsys
):
    folder = tmp_path / "run"
    first = start(folder, "--num_steps", 1000, "--processes", processes, run=PIXELS)
    wait_for(folder / "checkpoints" / "step-000001", first)
    settings = (folder / "config.yaml").read_bytes()
    for option in ("--resume", "--overwrite"):
        train_here(folder, option, code=2, run=PIXELS)
        named = re.search(r"is in use by process (\d+) on \S+ since ", capsys.readouterr().err)
        assert int(named[1]) in workers(first)
    assert (folder / "config.yaml").read_bytes() == settings
    first.send_signal(signal.SIGTERM)
    finish(first, 143)
    assert not (folder / "run.lock").exists()


def test_a_resumption_that_is_refused_leaves_the_run_as_it_was(tmp_path, capsys):
    folder = tmp_path / "run"
    train_here(folder, "--num_steps", 2, "--resume")  # without a run this begins one
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    train_here(folder, "--resume", "--policy.lora.rank", 4, code=2)
    assert "policy.lora.rank: 2 -> 4" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    train_here(folder, "--resume", "--num_steps", 3, "--optimizer.learning_rate", 1e-3)
    output = capsys.readouterr().err
    assert "changed num_steps: 2 -> 3" in output
    assert "changed optimizer.learning_rate: 0.0003 -> 0.001" in output
    assert summary(folder)["steps"] == 3


@pytest.mark.timeout(240 * (KILLS + 2))
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=pytest.mark.skipif(MANY not in os.environ, reason=MANY))]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_stops_at_random_moments_leave_no_trace(tmp_path, straight, number, processes):
    draw = random.Random(f"{SEED} {number} {processes}")
    print(f"{MANY}={KILLS} FLOWALIGN_KILLS_SEED={SEED}")  # noqa: T201
    saves = "--checkpoints.every", 1000 if number == signal.SIGTERM else 2
    options = (*LONG, *saves, "--processes", processes)
    expected, rounds, left = straight(processes), 0, KILLS
    while left:
        folder, rounds = tmp_path / str(rounds), rounds + 1
        code = 1
        while code and left:
            code, where = _stopped(folder, options, number, draw)
            print(f"{where}: exit code {code}")  # noqa: T201
            left -= code != 0
        if code:
            train_here(folder, *options, *_how(folder), run=PIXELS)
        assert_same_run(expected, folder, STEPS)
        assert summary(folder)["after"].keys() == summary(expected)["after"].keys()


def _how(folder: Path) -> list[str]:
    return ["--resume"] if (folder / "config.yaml").exists() else []


def _stopped(
    folder: Path, options: tuple, number: signal.Signals, draw: random.Random
) -> tuple[int, str]:
    """Start or resume a run and stop it at a random moment; its exit code, and when that was."""
    before = steps_logged(folder)
    process = start(folder, *options, *_how(folder), run=PIXELS)
    if draw.random() < 0.25:  # while it starts, or whenever that is on this machine
        time.sleep(draw.uniform(0, 3))
    else:
        until = before + draw.randint(1, 3)
        while process.poll() is None and steps_logged(folder) < min(until, STEPS):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.3))
    if process.poll() is None:
        pids = workers(process)
        logged = steps_logged(folder)
        os.kill(process.pid if number == signal.SIGTERM else draw.choice(pids), number)
    else:
        logged = STEPS
    output = process.communicate(timeout=240)[0]
    if number == signal.SIGTERM and process.returncode:
        assert process.returncode in (143, -signal.SIGTERM), output
        assert saved(folder) >= logged, output
    elif process.returncode == 0:
        assert saved(folder) == STEPS
    return process.returncode, f"{number.name} after {logged} steps"


def saved(folder: Path) -> int:
    newest = checkpoint.latest(folder / "checkpoints")
    return int(newest.name.removeprefix("step-")) if newest else 0

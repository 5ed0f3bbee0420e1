"""Several processes of one command: their output, and their common end."""

import ipaddress
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from flowalign.distributed import processes, ray_train
from flowalign.distributed.elastic import run_together
from flowalign.distributed.launch import (
    RUN_ID,
    Launch,
    leave_failure,
    leave_stop,
    read_first_failure,
)
from flowalign.distributed.ray_train import Board
from flowalign.utils import interrupts
from tests.fixtures.processes import PATIENCE, Watched, find_listeners
from tests.fixtures.ranks import start_ranks
from tests.fixtures.stopped_runs import free_port
from tests.fixtures.zygote import python

SLEEP = "import time; time.sleep(600)"
START = """
import os, sys, time
from pathlib import Path
from flowalign.distributed.launch import leave_crashes, leave_failure, leave_stop, report_restart
from flowalign.utils.interrupts import end_with_parent
end_with_parent()
leave_crashes()
report_restart()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
"""
JOIN = """
from flowalign.distributed.processes import join
joined = join("cpu")
joined.barrier()
"""
LAST = """
if rank == 0:
    while not (file.parents[1] / "1" / "error.json").exists():
        time.sleep(0.01)
    time.sleep(0.1)
"""
"""The first process fails after the second one, because of it."""


def run(code: str, count: int = 2, restarts: int = 0) -> int:
    """Exit code of a launcher, which is this process."""
    with patch.dict(os.environ):
        try:
            return run_together(Launch(count, restarts), [python(), "-c", START + code])
        finally:
            logging.disable(logging.NOTSET)


def launcher(code: str) -> subprocess.Popen:
    command = [python(), "-c", START + code]
    launch = "import sys; from flowalign.distributed.elastic import *; "
    launch += f"sys.exit(run_together(Launch(2), {command!r}))"
    return subprocess.Popen([python(), "-c", launch], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_each_process_knows_its_place_and_only_the_user_reads_where_they_meet(tmp_path):
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    mode = "oct(Path(os.environ['FLOWALIGN_STORE']).parent.stat().st_mode & 0o777)"
    note = f"Path({str(tmp_path)!r}, str(rank)).write_text"
    assert run(f"{note}(' '.join([*(os.environ[n] for n in {names}), {mode}]))", 3) == 0
    wanted = [f"{rank} {rank} 3 3 0o700" for rank in range(3)]
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == wanted


@pytest.mark.slow
def test_the_process_that_failed_first_speaks_alone_and_sets_the_exit_code(capfd):
    failing = (
        "code = 2 if rank else 1; leave_failure(code, f'rank {rank} is wrong\\n'); sys.exit(code)"
    )
    code = LAST + failing
    assert run(code) == 2
    assert capfd.readouterr().err == "rank 1 is wrong\n"


@pytest.mark.slow
def test_a_crash_is_told_by_one_traceback(capfd):
    assert run(LAST + "raise RuntimeError(f'rank {rank} broke')") == 1
    told = capfd.readouterr().err
    assert told.count("Traceback") == 1
    assert told.endswith("RuntimeError: rank 1 broke\n")


@pytest.mark.slow
def test_a_failure_ends_processes_that_would_wait_forever_and_leaves_no_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fail = "leave_failure(2, 'no\\n'); assert file.is_file()"
    assert run(f"{fail}\nif rank == 0:\n    {SLEEP}\nsys.exit(2)") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_process_is_named_though_the_others_fail_after_it(capfd):
    die = "if rank == 1:\n    os.kill(os.getpid(), 9)\nleave_failure(1, 'lost\\n')\ntime.sleep(600)"
    assert run(die) == 1
    told = capfd.readouterr().err
    assert "flowalign: process 1 of 2 was ended by SIGKILL" in told
    assert "lost" not in told


@pytest.mark.slow
def test_a_process_that_ends_without_a_word_is_named_with_its_exit_code(capfd):
    assert run("sys.exit(7 * rank)") == 7
    assert capfd.readouterr().err == "flowalign: process 1 of 2 ended with exit code 7\n"


@pytest.mark.slow
def test_a_failure_restarts_all_processes_as_often_as_asked_for(capfd):
    assert run("sys.exit(3 * (attempt < 2 and rank))", restarts=2) == 0
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if "restart" in line] == [
        "flowalign: restart 1 of 2",
        "flowalign: restart 2 of 2",
    ]
    assert run("sys.exit(3 * rank)", restarts=1) == 3


@pytest.mark.slow
def test_an_error_of_the_user_is_not_repeated_and_a_stop_is_final(capfd, tmp_path):
    note = f"Path({str(tmp_path)!r}, f'{{rank}} {{attempt}}').touch()"
    assert run(f"{note}; leave_failure(2, 'no\\n'); sys.exit(2)", restarts=2) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 0", "1 0"]
    assert run("sys.exit(leave_stop(143 * rank))", restarts=2) == 143
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if not re.match(r"[EW]\d{4} ", line)] == ["no"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_a_launcher_that_is_killed(tmp_path, number):
    watched = Watched(tmp_path)
    started = launcher(watched.source + "\n" + SLEEP)
    watched.wait_for(2)
    started.send_signal(number)
    watched.wait_for_the_end()
    started.communicate(timeout=PATIENCE)


@pytest.mark.slow
def test_ctrl_c_reaches_every_process_and_is_no_failure(tmp_path):
    watched = Watched(tmp_path)
    stop = "import signal; signal.signal(signal.SIGINT, lambda *_: sys.exit(130))"
    started = launcher("\n".join([stop, watched.source, SLEEP]))
    watched.wait_for(2)
    started.send_signal(signal.SIGINT)
    assert started.communicate(timeout=PATIENCE)[1] == ""
    assert started.returncode == 130


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="lists sockets with /proc")
def test_no_other_machine_can_connect_to_processes_of_one_machine(tmp_path):
    watched = Watched(tmp_path)
    started = launcher("\n".join([JOIN, watched.source, SLEEP]))
    watched.wait_for(2)
    listening = find_listeners(started.pid)
    started.terminate()
    started.communicate(timeout=PATIENCE)
    assert listening, "gloo listens"
    assert [a for a in listening if not ipaddress.ip_address(a).is_loopback] == []


@pytest.mark.slow
def test_processes_meet_again_after_one_is_killed(tmp_path, caplog):
    die = "if rank == 1 and attempt == 0:\n    os.kill(os.getpid(), 9)"
    count = f"Path({str(tmp_path)!r}, str(rank)).write_text(str(joined.sum_by_name({{'n': 1}})))"
    assert run("\n".join([JOIN, die, count]), restarts=1) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["{'n': 2}"] * 2
    # The launcher names the process that it sees first: the killed one, or the one that misses it.
    assert re.search(r"failed \(exitcode: (-9\) local_rank: 1|1\) local_rank: 0)", caplog.text)


@pytest.mark.slow
def test_a_third_ctrl_c_ends_processes_that_ignore_it(tmp_path):
    watched = Watched(tmp_path)
    count = "import signal; count = lambda *_: os.write(alive, b'c')"
    count += "; signal.signal(signal.SIGINT, count); signal.signal(signal.SIGTERM, count)"
    started = launcher("\n".join([watched.source, count, "os.write(alive, b'x')", SLEEP]))
    watched.wait_for(4)
    for _ in range(2):
        started.send_signal(signal.SIGINT)
        watched.wait_for(2, b"c")
    started.send_signal(signal.SIGINT)
    watched.wait_for_the_end()
    started.communicate(timeout=PATIENCE)
    assert started.returncode == 130


def test_a_number_of_processes_without_a_rank_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but RANK is not set: a launcher sets"):
        processes.join("cpu")


@pytest.mark.slow
def test_a_process_that_waits_for_others_says_so_and_stops_at_once():
    """Another machine may never start; torch would wait for ten minutes, deaf to signals."""
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = (
        "import functools\nfrom flowalign.distributed import processes\n"
        "from flowalign.utils.console import Patience\nfrom flowalign.utils.interrupts import *\n"
        "processes.Patience = functools.partial(Patience, seconds=0.5)\n"
        "try:\n    with sigterm_stops():\n        processes.join('cpu')\n"
        "except KeyboardInterrupt as stop:\n    raise SystemExit(exit_code(stop))\n"
    )
    pipes = {"stderr": subprocess.PIPE, "text": True}
    waiting = subprocess.Popen([python(), "-c", code], env=os.environ | place, **pipes)
    assert waiting.stderr is not None
    told = waiting.stderr.readline()
    waiting.terminate()
    assert waiting.wait(timeout=30) == 143
    assert told.startswith(f"waiting for all 2 processes to meet at 127.0.0.1:{port}, 0.5 seconds")


def test_more_processes_than_cores_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    processes.check_fits(4, "cpu")
    with pytest.raises(ValueError, match=r"^--processes is 5, but this machine has 4 CPU cores; "):
        processes.check_fits(5, "cpu")


def test_more_processes_than_gpus_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"^--processes is 2, but this machine has 1 GPU; "):
        processes.check_fits(2, "auto")


def test_each_rank_tells_nccl_its_device(monkeypatch):
    class Joined(Exception):
        """Ends `join` where the processes would meet."""

    def meet(backend, **options):
        raise Joined(backend, options["device_id"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Joined) as joined:
        processes.join("cuda")
    assert joined.value.args == ("nccl", torch.device("cuda", 1))
    with pytest.raises(Joined) as joined:
        processes.join("cpu")
    assert joined.value.args == ("gloo", None)


# Workers of Ray Train leave how they failed on the board, which the command reads -----------------


class Actor:
    """A board in this process, called like an actor."""

    def __init__(self, board):
        self.board = board

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.board, name))


@pytest.fixture
def work(monkeypatch, tmp_path):
    """Run a command as the first worker of a board."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda value: value))
    monkeypatch.setattr(interrupts, "_SOURCES", [])
    monkeypatch.chdir(tmp_path)

    def run(board, main):
        config = {"board": Actor(board), "main": main, "words": ["a"], "folder": str(tmp_path)}
        with patch.dict(os.environ, {"RANK": "0"}):
            ray_train._work(config)

    return run


def crash(words):
    sys.stdout.write(words[0])
    raise IndexError("beyond the end")


def test_a_crash_of_a_worker_is_told_by_its_traceback(work):
    board = Board()
    with pytest.raises(IndexError):
        work(board, crash)
    output, starts, (code, text) = board.read(0)
    assert (output, starts, code) == ("a", 1, 1)
    assert text.count("Traceback") == 1
    assert text.endswith("IndexError: beyond the end\n")


def test_a_restart_forgets_the_failure_before_it(work):
    board = Board()
    with pytest.raises(IndexError):
        work(board, crash)
    work(board, lambda words: sys.exit(0))
    assert board.read(0)[1:] == (2, None)


def test_an_exit_code_is_a_failure(work):
    with pytest.raises(RuntimeError, match="exit code 143"):
        work(Board(), lambda words: sys.exit(143))


# No test forks a process with threads -------------------------------------------------------------


def test_a_test_does_not_fork_its_own_process():
    with pytest.raises(RuntimeError, match="may deadlock"):
        os.fork()


def _count_threads_of_parent(_: int, out: Path) -> None:
    out.write_text(str(len(os.listdir(f"/proc/{os.getppid()}/task"))))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_ranks_are_forked_from_a_process_with_one_thread(tmp_path):
    start_ranks(_count_threads_of_parent, 1, tmp_path / "threads")
    assert (tmp_path / "threads").read_text() == "1"


# Failures that processes leave for their launcher -------------------------------------------------


def test_the_earliest_failure_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", RUN_ID)
    assert read_first_failure(tmp_path) is None
    for rank, seconds in enumerate((20, 10)):
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert leave_failure(2, f"rank {rank}")
        os.utime(file, (seconds, seconds))
    assert read_first_failure(tmp_path) == (10, 2, "rank 1")


def test_a_stop_is_no_failure_for_the_agent(monkeypatch, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", RUN_ID)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert leave_stop(1) == 1
    assert not file.exists()
    assert leave_stop(143) == 0
    assert json.loads(file.read_text())["code"] == 143


def test_other_launchers_get_exit_codes_and_no_files(monkeypatch, tmp_path):
    for run in (None, "align"):
        if run:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        assert not leave_failure(2, "wrong")
        assert leave_stop(143) == 143
    assert list(tmp_path.iterdir()) == []

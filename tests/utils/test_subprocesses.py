"""Parallel commands: their number, the cost of a failure, and stopping all of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowalign.utils.subprocesses import CommandJob, run_all


def job(folder: Path, name: str, code: str) -> CommandJob:
    return CommandJob(name, [sys.executable, "-c", code], folder / "logs" / f"{name}.log")


def test_a_failure_is_named_its_output_is_kept_and_the_others_go_on(tmp_path):
    said = []
    jobs = [
        job(tmp_path, "a", "print('fine')"),
        job(tmp_path, "b", "raise SystemExit('broken')"),
        job(tmp_path, "c", "print('fine too')"),
    ]
    assert run_all(jobs, 1, said.append) == [jobs[1]]
    assert [jobs[i].log.read_text().strip() for i in range(3)] == ["fine", "broken", "fine too"]
    assert [line.split()[:2] for line in said] == [
        ["started", "a,"],
        ["finished", "a"],
        ["started", "b,"],
        ["failed", "b"],
        ["started", "c,"],
        ["finished", "c"],
    ]
    assert str(jobs[1].log) in said[3]


@pytest.mark.slow
def test_no_more_than_asked_for_run_at_once(tmp_path):
    """Each of four leaves a mark while it lives and tells how many marks it saw."""
    code = (
        "import pathlib, os, time\n"
        f"marks = pathlib.Path({str(tmp_path)!r}) / 'marks'\n"
        "mine = marks / str(os.getpid()); mine.touch(); time.sleep(0.3)\n"
        "print(len(list(marks.iterdir()))); mine.unlink()"
    )
    (tmp_path / "marks").mkdir()
    jobs = [job(tmp_path, str(i), code) for i in range(4)]
    assert run_all(jobs, 2, lambda _: None) == []
    assert max(int(one.log.read_text()) for one in jobs) <= 2


STOPPED = """
import sys, pathlib
from flowalign.utils.subprocesses import CommandJob, run_all
folder = pathlib.Path(sys.argv[1])
code = '''
import signal, sys, time, pathlib
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
pathlib.Path(sys.argv[1], sys.argv[2] + ".up").touch()
while not asked:
    time.sleep(0.01)
time.sleep(0.3)
print("saved", len(asked), flush=True)
sys.exit(130)
'''
command = [sys.executable, "-c", code, str(folder)]
jobs = [CommandJob(name, [*command, name], folder / f"{name}.log") for name in "abc"]
try:
    run_all(jobs, 2, lambda text: print(text, flush=True))
except KeyboardInterrupt:
    print("stopped")
"""


def stopped_by(number: int, folder: Path, *, group: bool) -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    while not ((folder / "a.up").exists() and (folder / "b.up").exists()):
        assert process.poll() is None
        time.sleep(0.01)
    (os.killpg if group else os.kill)(process.pid, number)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 0, output
    return output


def test_ctrl_c_reaches_every_running_command_once_and_waits_for_it(tmp_path):
    """A terminal signals the whole group; nothing new is started."""
    output = stopped_by(signal.SIGINT, tmp_path, group=True)
    assert output.splitlines()[-1] == "stopped"
    assert "stopping 2 runs" in output
    assert [(tmp_path / f"{n}.log").read_text() for n in "ab"] == ["saved 1\n"] * 2
    assert not (tmp_path / "c.log").exists()


def test_a_polite_kill_leaves_no_command_behind(tmp_path):
    assert "stopped" in stopped_by(signal.SIGTERM, tmp_path, group=False)
    assert (tmp_path / "a.log").read_text() == "saved 1\n"

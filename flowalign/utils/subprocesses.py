"""Start processes that end with this one: commands in parallel, and single child processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowalign.utils.console import duration
from flowalign.utils.interrupts import sigterm_stops, tie_to_parent

_SECONDS_BETWEEN_LOOKS = 0.1
_LINES = 3
_SECONDS_TO_END = 10.0
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables of ranks, because a child process is no rank of the run."""


@dataclass(frozen=True)
class CommandJob:
    """Command with a name and the file for its output."""

    name: str
    command: Sequence[str]
    log: Path

    def last_line(self) -> str:
        """Return the name and the last line of the log."""
        lines = [
            line
            for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        last = lines[-1] if lines else "no output"
        return f"{self.log}: {last.removeprefix('error: ').removeprefix('flowalign: ')}"


def shard_jobs(
    words: Sequence[str], count: int, logs: Path, without: Sequence[str] = ()
) -> list[CommandJob]:
    """Return the `count` shards of a command, which lose `--processes N` and options `without`."""
    kept = list(words)
    for name in ("--processes", *without):
        kept = [word for word in kept if not word.startswith(f"{name}=")]
        if name in kept:
            place = kept.index(name)
            del kept[place : place + 2]
    command = [sys.executable, "-m", "flowalign", *kept]
    return [
        CommandJob(f"shard {i}", [*command, "--shard", f"{i}/{count}"], logs / f"{i}.log")
        for i in range(count)
    ]


def run_all(
    jobs: Sequence[CommandJob], at_once: int, log: Callable[[str], None]
) -> list[CommandJob]:
    """Run every job, `at_once` at a time, and return the failed jobs.

    On Ctrl-C or SIGTERM, running jobs get SIGINT, and this function waits for them. If this process
    is killed, the jobs end with it.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; raised after all jobs have stopped.
    """
    waiting, failed = list(jobs), []
    running: dict[subprocess.Popen, tuple[CommandJob, float]] = {}
    with sigterm_stops():  # so that no job outlives this process
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running[_start(job)] = job, time.perf_counter()
                    log(f"started {job.name}, {len(jobs) - len(waiting)} of {len(jobs)}")
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                for process in [p for p in running if p.poll() is not None]:
                    job, start = running.pop(process)
                    failed += [job] if process.returncode else []
                    log(_ending(job, process.returncode, time.perf_counter() - start))
        finally:
            _stop(running, log)
    return failed


def _start(job: CommandJob) -> subprocess.Popen:
    """Start a job in its own process group, so that Ctrl-C reaches it only through `_stop`."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            **tie_to_parent(),
        )


def _ending(job: CommandJob, code: int, seconds: float) -> str:
    if code:
        return f"failed {job.name} after {duration(seconds)}, exit code {code}: {job.log}"
    return f"finished {job.name} in {duration(seconds)}"


def _stop(running: Iterable[subprocess.Popen], log: Callable[[str], None]) -> None:
    """Send SIGINT to jobs; a second Ctrl-C repeats it, which ends a run; a third kills them."""
    processes = [process for process in running if process.poll() is None]
    if processes:
        log(f"stopping {len(processes)} runs after the step in progress; they save their progress")
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        try:
            for process in processes:
                process.send_signal(number)
            for process in processes:
                process.wait()
            return
        except KeyboardInterrupt:
            continue


class ChildProcess:
    """Process with its output in a log, in a temporary folder that is deleted with it.

    The command must be a flowalign command, which ends with this process even after SIGKILL.
    `files` are file descriptors that it inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: tempfile.TemporaryDirectory,
        environment: Mapping[str, str],
        files: Sequence[int] = (),
    ):
        self._log = Path(folder.name, "log")
        inherited = {**os.environ, **environment}
        for name in _RANK:
            inherited.pop(name, None)
        arguments = tie_to_parent(inherited)
        arguments["pass_fds"] += tuple(files)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must only reach the trainer, which may finish a step
                **arguments,
            )
        self._end = weakref.finalize(self, _end, self.process, folder)

    def ending(self) -> str:
        """Return how the process ended, with the last lines of its log; "" if it still runs.

        It waits for up to 10 seconds, because a connection breaks shortly before its process ends.
        """
        try:
            code = self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return ""
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        how += ", as the system does when memory runs out" * (code == -signal.SIGKILL)
        said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"it {how}", *[line for line in said if line.strip()][-_LINES:]])

    def end(self) -> None:
        """Kill the process and its children; it has no state to save."""
        self._end()


def select_device(device: str | None) -> dict[str, str]:
    """Return the environment variables that restrict a child process to one device.

    `device` is `cpu` or `cuda:N`, with N as numbered in this process; None: the current device of
    this process.

    Raises:
        ValueError: This process sees no device N.
    """
    import torch

    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    if device is None and not torch.cuda.is_available():
        return {}
    number = torch.cuda.current_device() if device is None else int(device.partition(":")[2])
    count = torch.cuda.device_count()
    if number >= count:
        raise ValueError(f"device of a child process is {device}; this process sees {count} GPUs")
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": names.split(",")[number]}


def _end(process: subprocess.Popen, folder: tempfile.TemporaryDirectory) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    folder.cleanup()

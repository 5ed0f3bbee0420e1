"""Run commands in parallel, each with a separate log file."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowalign.utils.console import duration
from flowalign.utils.interrupts import sigterm_stops
from flowalign.utils.parent_watchdog import tie_to_parent

_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class CommandJob:
    """Command with a name and the file for its output."""

    name: str
    command: Sequence[str]
    log: Path

    def last_line(self) -> str:
        """Return the name and the last line of the log."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
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

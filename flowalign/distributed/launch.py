"""Start a command as several processes on this machine, which end together.

The launcher lives as long as the processes, so it must be small. `relaunch` therefore replaces the
process that validated the command, and frees its memory and GPU context.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowalign.distributed.failures import FOLDER, read_first_failure
from flowalign.utils.parent_watchdog import tie_to_parent

STOPPED = 130, 143
"""Exit codes of a process that was stopped by Ctrl-C or SIGTERM, which is no failure."""
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_END = 10.0


def relaunch(processes: int, argv: Sequence[str]) -> None:
    """Replace this process by a launcher that starts the command once per process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", __name__, str(processes), *argv])


def run_together(processes: int, command: Sequence[str]) -> int:
    """Run a command once per process, and return its exit code.

    The first failure ends all processes and is the only one reported. Ctrl-C and SIGTERM are
    forwarded, and the processes may take as long as they need to stop. A third Ctrl-C ends them.
    """
    workers: list[subprocess.Popen] = []
    with (
        tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True) as folder,
        _forward_signals(workers) as asked,
    ):
        try:
            for rank in range(processes):
                workers.append(_start(command, rank, processes, folder))
            codes = _wait(workers)
        finally:
            _end_all(workers)
        if asked.count(signal.SIGINT) > 1:
            sys.stderr.write("flowalign: stopped; saved files are intact, continue with --resume\n")
            return 128 + signal.SIGINT
        code, text = _describe_outcome(codes, Path(folder))
        sys.stderr.write(text)
        return code


def _start(command: Sequence[str], rank: int, world: int, folder: str) -> subprocess.Popen:
    """Start a process in its own process group."""
    # The terminal sends Ctrl-C to its foreground group. A worker in that group would get it twice,
    # from the terminal and from `_forward_signals`, and stop at once instead of after its step.
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ) | {FOLDER: folder}
    environment |= {name: str(value) for name, value in place.items()}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, process_group=0, **tie_to_parent(environment)
    )


def _wait(workers: Sequence[subprocess.Popen]) -> list[int | None]:
    """Wait until all workers have ended or one has failed; return their exit codes."""
    while True:
        codes = [_exit_code(worker) for worker in workers]
        if _failures(codes):
            # Poll again: the process that failed first may have ended between two polls.
            return [_exit_code(worker) for worker in workers]
        if None not in codes:
            return codes
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _exit_code(worker: subprocess.Popen) -> int | None:
    """Return an exit code; a worker ended by SIGINT or SIGTERM while starting counts as stopped."""
    code = worker.poll()
    return 128 - code if code in (-signal.SIGINT, -signal.SIGTERM) else code


def _failures(codes: Sequence[int | None]) -> dict[int, int]:
    """Return the exit codes of failed workers by rank."""
    return {rank: code for rank, code in enumerate(codes) if code not in (None, 0, *STOPPED)}


def _end_all(workers: Sequence[subprocess.Popen]) -> None:
    """End the running workers by SIGTERM, and by SIGKILL after 10 seconds."""
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + _SECONDS_TO_END
    for worker in workers:
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _describe_outcome(codes: Sequence[int | None], folder: Path) -> tuple[int, str]:
    """Return the exit code of the launcher, and a message about the first failed process."""
    failed, left = _failures(codes), read_first_failure(folder)
    killed = [rank for rank, code in failed.items() if code < 0]
    if killed:
        name = signal.Signals(-failed[killed[0]]).name
        why = ", as the system does when memory runs out" * (name == "SIGKILL")
        return 1, f"flowalign: process {killed[0]} of {len(codes)} was ended by {name}{why}\n"
    if left:
        return left
    for rank, code in failed.items():
        return code, f"flowalign: process {rank} of {len(codes)} ended with exit code {code}\n"
    return max((code for code in codes if code in STOPPED), default=0), ""


@contextmanager
def _forward_signals(workers: Sequence[subprocess.Popen]) -> Iterator[list[int]]:
    """Forward Ctrl-C and SIGTERM to the workers; yield a list of the received signals."""
    asked: list[int] = []

    def hand_on(number: int, _: object) -> None:
        asked.append(number)
        if asked.count(signal.SIGINT) > 2:
            sys.exit(128 + signal.SIGINT)
        for worker in workers:
            worker.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run_together(int(sys.argv[1]), [sys.executable, "-m", "flowalign", *sys.argv[2:]]))

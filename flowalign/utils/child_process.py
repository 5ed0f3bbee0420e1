"""Start child processes that end with this process, and describe how they ended."""

import os
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flowalign.utils.parent_watchdog import tie_to_parent

_LINES = 3
_SECONDS_TO_END = 10.0
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables of ranks, because a child process is no rank of the run."""


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
        said = self._log.read_text(errors="replace").splitlines()
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

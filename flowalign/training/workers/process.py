"""Control one rollout worker: start it, give it weights and jobs, and read its answers.

Messages are JSON over a pair of sockets. Tensors are safetensors files in a shared folder, so that
no message is large enough to block its sender, even if the other process hangs.
"""

import hashlib
import json
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.utils.child_process import ChildProcess, select_device

MODULE = "flowalign.runs.rollout_worker"
"""Module of the worker, which is started as a program."""


class WorkerLost(Exception):
    """Error that a worker was killed or hangs; another worker can do its jobs."""


class WorkerFailed(Exception):
    """Error of a worker that would fail again with the same jobs."""


class WorkerProcess:
    """Worker process with its weights and the jobs that it has not answered.

    `timeout` and `start_timeout` are seconds for a job and for loading the model.
    """

    def __init__(self, run_file: Path, device: str | None, timeout: float, start_timeout: float):
        self.run_file, self.device = run_file, device
        self.timeout, self.start_timeout = timeout, start_timeout
        self.weights: dict[str, Any] = {}
        self.jobs: deque[dict[str, Any]] = deque()
        self.start()

    def start(self) -> None:
        """Start the process, which loads the model in the background."""
        mine, theirs = socket.socketpair()
        folder = tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True)
        with theirs:
            command = [sys.executable, "-m", MODULE, str(self.run_file)]
            command += [str(theirs.fileno()), str(torch.get_num_threads())]
            environment = select_device(self.device)
            self._child = ChildProcess(command, folder, environment, [theirs.fileno()])
        self.connection = Connection(mine.detach())
        self._is_loaded = self._is_begun = False

    def assign(self, weights: dict[str, Any], jobs: Sequence[dict[str, Any]]) -> None:
        """Set the weights and jobs of a training step; `begin` sends them."""
        self.weights, self.jobs, self._is_begun = weights, deque(jobs), False

    def begin(self) -> None:
        """Send the weights, compare those that the worker has set, and send the jobs.

        Raises:
            WorkerLost: The worker was killed or hangs.
            WorkerFailed: It ended with an error, or has other weights.
        """
        if not self._is_loaded:
            self._receive(self.start_timeout)
            self._is_loaded = True
        self._send(self.weights)
        there = self._receive(self.timeout)
        if wrong := {name: there[name] for name in there if there[name] != self.weights[name]}:
            raise WorkerFailed(f"it has other weights than it was sent: {wrong}")
        for job in self.jobs:
            self._send(job)
        self._is_begun = True

    def next_answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest job, and return it.

        Raises:
            WorkerLost: The worker was killed or hangs.
            WorkerFailed: It ended with an error.
        """
        if not self._is_begun:
            self.begin()
        answer = self._receive(self.timeout)
        self.jobs.popleft()
        return answer

    def end(self) -> None:
        """Kill the process."""
        self._child.end()
        self.connection.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            self._raise_ending()

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self.connection.poll(seconds):
                return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._raise_ending()
        raise WorkerLost(f"it did not answer within {seconds:g} s")

    def _raise_ending(self) -> None:
        """Raise WorkerLost if the process was ended by a signal, else WorkerFailed."""
        why = self._child.ending()
        if self._child.process.returncode is None:
            raise WorkerLost("it closed its connection")
        if self._child.process.returncode < 0:
            raise WorkerLost(why)
        raise WorkerFailed(why)


def digest_tensors(named: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name in sorted(named):
        value = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

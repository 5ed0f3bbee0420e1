"""Serve one reward model in a separate process, which ends with its parent process."""

import os
import secrets
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from flowalign.rewards.client import RewardClient
from flowalign.rewards.config import build_reward_models
from flowalign.types import RewardSpec
from flowalign.utils.local_modules import name_files
from flowalign.utils.parent_watchdog import tie_to_parent

TOKEN = "FLOWALIGN_REWARD_TOKEN"
_UNLIMITED = {
    "max_wait_ms": 0,  # the only client waits for each answer
    "max_request_mb": 65536,
    "max_image_mp": 5000,
    "max_request_mp": 5000,
    "max_held_mb": 262144,
}
"""Limits of a server that only its parent process can reach."""
_LINES = 3
_SECONDS_TO_END = 10.0


def read_declaration(reward: Mapping[str, Any]) -> RewardSpec:
    """Return the spec of a reward model, constructed in this process; its weights are not read.

    Raises:
        ConfigError: The model cannot be imported in this process, or its settings are wrong.
    """
    (model,), _ = build_reward_models({"rewards": [dict(reward)]}, str(reward.get("class_path")))
    return model.spec


class Scorer:
    """Process that serves one reward model on the loopback interface.

    `device` is `cpu` or `cuda:N`, with N as numbered in this process; null: the current device of
    this process. A random token in the environment keeps other users of the machine out.
    """

    def __init__(
        self, reward: Mapping[str, Any], python: str, device: str | None, seconds: float
    ) -> None:
        self.name = str(reward["class_path"]).rpartition(".")[2]
        self.seconds, self.token = seconds, secrets.token_urlsafe(32)
        folder = tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True)
        self._log, file = Path(folder.name, "log"), Path(folder.name, "rewards.yaml")
        settings = yaml.safe_dump({"rewards": [dict(reward)]})
        file.write_text(name_files(settings), encoding="utf-8")
        environment = {**os.environ, TOKEN: self.token, **_device_environment(device)}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # the scorer is not a rank of the run
            environment.pop(name, None)
        with socket.create_server(("127.0.0.1", 0)) as listening, self._log.open("wb") as log:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            arguments = tie_to_parent(environment)
            arguments["pass_fds"] += (listening.fileno(),)
            self.process = subprocess.Popen(
                [*_command(python, file, seconds), "--socket", str(listening.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must only reach the trainer, which may finish a step
                **arguments,
            )
        self._end = weakref.finalize(self, _end, self.process, folder)

    def ready(self, seconds: float) -> RewardClient:
        """Return a client of the model as soon as it is loaded.

        Raises:
            ValueError: The model could not be started or loaded within `seconds`.
        """
        try:
            RewardClient(self.url, None, seconds, self.token).wait_until_ready()
        except ValueError as error:
            why = self.ending() or str(error)
            self.end()
            raise ValueError(f"the scorer of {self.name} cannot be used: {why}") from error
        return RewardClient(self.url, None, self.seconds, self.token)

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
        """End the process."""
        self._end()


def _command(python: str, file: Path, seconds: float) -> list[str]:
    command = [python, "-m", "flowalign", "serve-reward", str(file)]
    for name, value in {**_UNLIMITED, "deadline": seconds, "read_timeout": seconds}.items():
        command += [f"--{name}", f"{value}"]
    return command


def _device_environment(device: str | None) -> dict[str, str]:
    """Return the environment variables that restrict a process to one device."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    if device is None and not torch.cuda.is_available():
        return {}
    number = torch.cuda.current_device() if device is None else int(device.partition(":")[2])
    count = torch.cuda.device_count()
    if number >= count:
        raise ValueError(f"device of a scorer is {device}; this process sees {count} GPUs")
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": names.split(",")[number]}


def _end(process: subprocess.Popen, folder: tempfile.TemporaryDirectory) -> None:
    """Kill the process and its children; it has no state to save."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    folder.cleanup()

"""Serve one reward model in a separate process, which ends with its parent process."""

import math
import secrets
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flowalign.rewards.config import build_reward_models
from flowalign.rewards.reward_client import RewardClient
from flowalign.types import RewardSpec
from flowalign.utils.local_modules import name_files
from flowalign.utils.subprocesses import ChildProcess, select_device

TOKEN = "FLOWALIGN_REWARD_TOKEN"
_UNLIMITED = {
    "max_wait_ms": 0,  # the only client waits for each answer
    "max_request_mb": 65536,
    "max_image_mp": 5000,
    "max_request_mp": 5000,
    "max_held_mb": 262144,
}
"""Limits of a server that only its parent process can reach."""


def declare(reward: Mapping[str, Any], dims: Sequence[str] | None) -> RewardSpec:
    """Return the spec of a reward model that runs in another process.

    Without `dims` the model is constructed in this process; its weights are not read. With `dims`
    the rest of the spec is known only when the model is loaded.

    Raises:
        ConfigError: The model cannot be imported in this process, or its settings are wrong.
        ValueError: `reward` is no entry of a run file.
    """
    path = reward.get("class_path")
    if not isinstance(path, str) or set(reward) - {"class_path", "init_args"}:
        raise ValueError(f"reward is {reward}; it must have class_path, and may have init_args")
    if not dims:
        (model,), _ = build_reward_models({"rewards": [dict(reward)]}, path)
        return replace(model.spec, differentiable=False)
    return RewardSpec(
        name=path.rpartition(".")[2],
        dims=tuple(dims),
        modality="any",
        scale=(-math.inf, math.inf),
        licence="that of the scorer's model",
    )


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
        file = Path(folder.name, "rewards.yaml")
        settings = name_files({"rewards": [dict(reward)]})
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        environment = {TOKEN: self.token, **select_device(device)}
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            command = [*_command(python, file, seconds), "--socket", str(listening.fileno())]
            self._child = ChildProcess(command, folder, environment, [listening.fileno()])
        self.process = self._child.process

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
        """Return how the process ended, with the last lines of its log; "" if it still runs."""
        return self._child.ending()

    def end(self) -> None:
        """End the process."""
        self._child.end()


def _command(python: str, file: Path, seconds: float) -> list[str]:
    command = [python, "-m", "flowalign", "serve-reward", str(file)]
    for name, value in {**_UNLIMITED, "deadline": seconds, "read_timeout": seconds}.items():
        command += [f"--{name}", f"{value}"]
    return command

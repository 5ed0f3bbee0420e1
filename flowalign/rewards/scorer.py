"""Serve a reward model in a process that ends with its parent, or on a pool of Ray actors.

Batches and answers have the protocol of reward servers. Ray restarts an actor that was killed, and
repeats its calls.
"""

import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from flowalign.rewards.checked import CheckedReward, RewardFailure, RewardGone, load
from flowalign.rewards.config import build_reward_models
from flowalign.rewards.protocol import (
    CONTENT_TYPE,
    output_from_json,
    output_to_json,
    pack_batch,
    read_request,
)
from flowalign.rewards.reward_client import RewardClient, failed_answer
from flowalign.types import MediaBatch, RewardOutput, RewardSpec
from flowalign.utils.local_modules import name_files
from flowalign.utils.ray_cluster import join_cluster, prepare_ray
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
_NAMESPACE = "flowalign"
_SET_HERE = "namespace", "name", "get_if_exists", "max_restarts", "max_task_retries"
"""Ray's options of an actor that its pool sets."""


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
            limits = {**_UNLIMITED, "deadline": seconds, "read_timeout": seconds}
            command = [python, "-m", "flowalign", "serve-reward", str(file)]
            command += [f"--{name}={value}" for name, value in limits.items()]
            command += ["--socket", str(listening.fileno())]
            self.child = ChildProcess(command, folder, environment, [listening.fileno()])

    def ready(self, seconds: float) -> RewardClient:
        """Return a client of the model as soon as it is loaded.

        Raises:
            ValueError: The model could not be started or loaded within `seconds`.
        """
        try:
            RewardClient(self.url, None, seconds, self.token).wait_until_ready()
        except ValueError as error:
            why = self.child.ending() or str(error)
            self.child.end()
            raise ValueError(f"the scorer of {self.name} cannot be used: {why}") from error
        return RewardClient(self.url, None, self.seconds, self.token)


class ScorerActor:
    """Reward model in the process of an actor. Errors are answers, so Ray adds no traces."""

    def __init__(self, reward: Mapping[str, Any], folder: str, paths: list[str]):
        os.chdir(folder)  # relative paths and the user's modules are found as in the client
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        (model,), _ = build_reward_models({"rewards": [dict(reward)]}, str(reward["class_path"]))
        load(model)
        self.model = CheckedReward(model)

    def declare(self) -> RewardSpec:
        """Return the spec of the loaded model."""
        return self.model.spec

    def score(self, message: bytes) -> dict[str, Any]:
        """Return the scores of a packed batch, or the error of the model."""
        _, batch = read_request(message, CONTENT_TYPE, lambda _: None)
        try:
            return output_to_json(self.model.score(batch))
        except RewardFailure as error:
            return {"error": str(error)}


class ScorerPool:
    """Actors of equal settings, which several processes may share.

    `reward` is an entry of a run file, `options` are Ray's options of an actor.
    """

    def __init__(
        self, reward: Mapping[str, Any], actors: int, options: Mapping[str, Any], restarts: int
    ):
        if taken := sorted({*options} & {*_SET_HERE}):
            raise ValueError(
                f"options of Ray scorers name {', '.join(taken)}, which are set here: leave them "
                "out; num_cpus, num_gpus, resources and runtime_env are yours"
            )
        self.reward, self.count, self.restarts = reward, actors, restarts
        settings = json.dumps([reward, actors, options, restarts], sort_keys=True)
        self.name = f"{reward['class_path']}-{sha256(settings.encode()).hexdigest()[:16]}"
        # Restarts limit the calls: Ray would count those of a lost machine that it has not missed.
        fixed = (_NAMESPACE, self.name, True, restarts, -1 if restarts else 0)
        self.options = {**options, **dict(zip(_SET_HERE, fixed, strict=True))}
        self._next = int(os.environ.get("RANK", 0))

    def start(self, address: str | None, seconds: float) -> RewardSpec:
        """Start the actors that do not exist yet, and return the spec of their model.

        Actors end with the process that started them.

        Raises:
            ValueError: There is no cluster, or the model is not loaded within `seconds`.
        """
        ray = self._ray = prepare_ray("ray", address)
        if not ray.is_initialized():
            if address is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
                raise ValueError(
                    "processes share the actors of one Ray cluster: start it with `ray start "
                    "--head`, and set address of the scorer pool to auto"
                )
            join_cluster(ceil(self.count * self.options.get("num_cpus", 1)), address)
        kind, paths = ray.remote(ScorerActor), [path for path in sys.path if path]
        self.actors = [
            kind.options(**self.options | {"name": f"{self.name}-{i}"}).remote(
                dict(self.reward), str(Path.cwd()), paths
            )
            for i in range(self.count)
        ]
        try:
            return ray.get([one.declare.remote() for one in self.actors], timeout=seconds)[0]
        except ray.exceptions.GetTimeoutError as error:
            raise ValueError(
                f"the scorers of {self.name} are not ready after {seconds:g} s: "
                f"the cluster has {ray.cluster_resources()}"
            ) from error
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"the scorers of {self.name} cannot be used: {_last(error)}"
            ) from error

    def score(self, spec: RewardSpec, batch: MediaBatch, timeout: float) -> RewardOutput:
        """Return the scores of a batch, from the next actor in turn.

        Raises:
            RewardGone: The actor was killed more often than it may be restarted.
            RewardFailure: The model raised an error.
        """
        actor = self.actors[self._next % len(self.actors)]
        self._next += 1
        message = b"".join(pack_batch(batch, "float32", {}))
        try:
            answer = self._ray.get(actor.score.remote(message), timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            return failed_answer(spec, len(batch), f"no answer of {self.name} in {timeout:g} s")
        except self._ray.exceptions.RayError as error:
            raise RewardGone(f"the scorers of {spec.name!r} died: {_last(error)}") from error
        if "error" in answer:
            raise RewardFailure(answer["error"])
        return output_from_json(answer, spec, len(batch))


def _last(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]

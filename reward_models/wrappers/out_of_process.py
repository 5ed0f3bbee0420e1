"""Uses reward models of other processes like local ones: an environment, Ray actors or a server."""

import os
import random
import re
import shutil
import sys
import time
from abc import abstractmethod
from dataclasses import replace
from typing import Any, final

from flowalign.rewards.checked import RewardGone
from flowalign.rewards.protocol import Pixels
from flowalign.rewards.reward_client import RewardClient, failed_answer
from flowalign.rewards.scorer import Scorer, ScorerPool, declare
from flowalign.types import (
    Loadable,
    MediaBatch,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RewardModel,
    RewardOutput,
    RewardSpec,
    score_usable,
)
from flowalign.utils.errors import explain_errors


class OutOfProcessReward(RewardModel, Loadable):
    """Reward whose model another process holds.

    A subclass declares `spec` before that process is reached; `load` takes over the declaration of
    the model. A batch is sent without samples that cannot be scored.
    """

    @abstractmethod
    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of usable samples; raise RewardGone if the process is lost."""

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the samples that can be scored; raise RewardGone if the process is lost."""
        self.load()
        return score_usable(self.spec, batch, self.spec.screen(batch), self.request)

    def take_over(self, spec: RewardSpec, source: str) -> None:
        """Use the declaration of the model; raise ValueError if it has other dimensions.

        `source` begins the message, such as `the scorer gives`.
        """
        if spec.dims != self.spec.dims:
            declared = ", ".join(self.spec.dims)
            raise ValueError(f"{source} {', '.join(spec.dims)}, not {declared}")
        self.spec = spec


class ScorerProcess(OutOfProcessReward):
    """Scores with a reward model in a separate process on this machine.

    `reward` is an entry of `rewards:`, a class with its settings. `python` is the interpreter of an
    environment with flowalign and its extra `serve` (null: the current one). `device` is `cpu` or
    `cuda:N`, by default the device of the training process. Without `dims` the class is also
    constructed in the training process, so that its settings and needs are checked before anything
    starts. With `dims` it need not be importable in the training process. Each process of a run has
    a separate scorer.

    The scorer gets each batch whole, in float32. It has `timeout` seconds per batch and
    `start_timeout` seconds to load. A scorer that dies is restarted, up to `restarts` times per
    run, and gets the batch again; after that the run ends. There is no gradient.
    """

    def __init__(
        self,
        reward: dict[str, Any],
        python: str | None = None,
        device: str | None = None,
        dims: list[str] | None = None,
        timeout: PositiveFloat = 600.0,
        start_timeout: PositiveFloat = 1800.0,
        restarts: NonNegativeInt = 3,
    ):
        self.python = shutil.which(python or sys.executable) or ""
        if not self.python:
            raise ValueError(f"python of a scorer is {python!r}; it must be an executable here")
        if device is not None and not re.fullmatch(r"cpu|cuda:\d+", device):
            raise ValueError(f"device of a scorer is {device!r}; it must be cpu, cuda:N or null")
        self.reward, self.device = reward, device
        self.timeout, self.start_timeout, self.restarts = timeout, start_timeout, restarts
        self.spec = declare(reward, dims)

    def load(self) -> None:
        """Start the process, and wait until it has loaded the model."""
        self._start()

    def _start(self) -> None:
        self._scorer = Scorer(self.reward, self.python, self.device, self.timeout)
        self._client = self._scorer.ready(self.start_timeout)
        self.take_over(self._client.spec("float32"), f"the scorer of {self._scorer.name} gives")

    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of the batch; a process that died is restarted."""
        message = self._client.pack(batch, "float32")
        while True:
            answer = self._client.score(message, self.spec, len(batch))
            if isinstance(answer, RewardOutput):
                return answer
            why = self._scorer.child.ending() if answer.disconnected else ""
            if not why:
                return failed_answer(self.spec, len(batch), f"the scorer failed with {answer.why}")
            self._restart(why)

    def _restart(self, why: str) -> None:
        """Restart the process; raise RewardGone if no restarts are left or the start fails."""
        died = f"the process of the reward {self.spec.name!r} died"
        if self.restarts == 0:
            raise RewardGone(f"{died}: {why}")
        self.restarts -= 1
        with explain_errors(f"{died}, and", to=RewardGone):
            self._start()


class RayScorers(OutOfProcessReward):
    """Scores with a reward model on `actors` actors of a Ray cluster.

    `reward` is an entry of `rewards:`, a class with its settings. Entries with equal settings share
    the actors, also those of other processes in the cluster. `options` are Ray's options of an
    actor, such as `{num_gpus: 0.5, runtime_env: {pip: [...]}}`. `dims` are needed if the class can
    only be imported there. `address` is that of a running cluster, or auto; null starts one on this
    machine, for a single process.

    An actor gets each batch whole, in float32. It has `timeout` seconds per batch and
    `start_timeout` seconds to load. An actor that dies is restarted, up to `restarts` times, and
    gets the batch again; after that the run ends. There is no gradient.
    """

    def __init__(
        self,
        reward: dict[str, Any],
        actors: PositiveInt = 1,
        options: dict[str, Any] | None = None,
        dims: list[str] | None = None,
        address: str | None = None,
        timeout: PositiveFloat = 600.0,
        start_timeout: PositiveFloat = 1800.0,
        restarts: NonNegativeInt = 3,
    ):
        self.spec = declare(reward, dims)
        self.pool = ScorerPool(reward, actors, options or {}, restarts)
        self.address, self.timeout, self.start_timeout = address, timeout, start_timeout

    def load(self) -> None:
        """Start the actors, or connect to them."""
        spec = self.pool.start(self.address, self.start_timeout)
        self.take_over(spec, f"the scorers of {self.pool.name} give")

    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of the batch from one of the actors."""
        return self.pool.score(self.spec, batch, self.timeout)


class RemoteReward(OutOfProcessReward):
    """Requests the scores of one of a server's models.

    `dims` must equal the dimensions that the server lists under /spec; `load` compares them. `8bit`
    pixels are rounded as in an image file and transfer four times faster. A failed request is sent
    again up to `retries` times, with growing delays. If it still fails, its samples are invalid. A
    request that the server rejects raises ValueError. If the server is busy, the request is
    repeated after the delay that the server names; this counts as a failure only after `timeout`
    seconds. The token is read from the environment variable `token_env`.
    """

    def __init__(
        self,
        url: str,
        dims: list[str],
        model: str | None = None,
        pixels: Pixels = "float32",
        batch_size: PositiveInt = 64,
        timeout: PositiveFloat = 60.0,
        retries: NonNegativeInt = 3,
        token_env: str = "FLOWALIGN_REWARD_TOKEN",
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url {url!r} must start with http:// or https://")
        self.url, self.model = url.rstrip("/"), model
        self.pixels: Pixels = pixels
        self.batch_size, self.timeout, self.retries = batch_size, timeout, retries
        self.token_env = token_env
        self.spec = RewardSpec(
            name=model or "remote",
            dims=tuple(dims),
            licence="that of the server's model",
            version=f"{url} {pixels}",
        )

    def load(self) -> None:
        """Wait until the server has loaded the model."""
        token = os.environ.get(self.token_env)
        self._client = RewardClient(self.url, self.model, self.timeout, token)
        self._client.wait_until_ready()
        theirs = self._client.spec(self.pixels)
        self.take_over(replace(theirs, name=self.spec.name), f"{self.url} gives")

    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of the batch, `batch_size` samples at a time unless groups matter."""
        whole = "groups" in self.spec.needs
        chunks = [batch] if whole else batch.chunks(self.batch_size)
        return RewardOutput.concat([self._request_chunk(chunk) for chunk in chunks])

    def _request_chunk(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of a chunk; its samples are invalid after too many failures."""
        message, failures = self._client.pack(batch, self.pixels), 0
        until = time.monotonic() + self.timeout
        while True:
            answer = self._client.score(message, self.spec, len(batch))
            if isinstance(answer, RewardOutput):
                return answer
            if answer.retry_after is not None and time.monotonic() < until:
                time.sleep(answer.retry_after * random.uniform(1.0, 1.5))
                continue
            failures += 1
            if failures > self.retries:
                break
            time.sleep(min(0.25 * 2**failures, 8.0) * random.uniform(0.5, 1.0))
        reason = f"the reward server failed {failures} times, last with {answer.why} ({self.url})"
        return failed_answer(self.spec, len(batch), reason)

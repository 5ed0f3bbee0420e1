"""Uses a reward model behind `flowalign serve-reward` like any other."""

import json
import os
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import torch

from flowalign.rewards.protocol import (
    CONTENT_TYPE,
    VERSION,
    Piece,
    Pixels,
    output_from_json,
    pack_batch,
)
from flowalign.types import (
    Column,
    Loadable,
    MediaBatch,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RewardModel,
    RewardOutput,
    RewardSpec,
)

_LONGEST_WAIT_S = 30.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)


class RemoteReward(RewardModel, Loadable):
    """Requests the scores of one of a server's models.

    `dims` must be those that the server lists under /spec; `load` compares them. `8bit` pixels are
    rounded like in an image file and travel four times faster. A request that fails is sent again
    up to `retries` times, with growing delays; one that still fails makes its samples invalid, and
    one that the server rejects raises ValueError. A server that has no room is asked again when it
    says, which is no failure until `timeout` seconds have passed. The token is read from the
    environment variable `token_env`.
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
        if batch_size < 1 or timeout <= 0 or retries < 0:
            raise ValueError(
                f"batch_size {batch_size}, timeout {timeout}, retries {retries}: need at least 1, "
                "more than 0, and at least 0"
            )
        self.url, self.model = url.rstrip("/"), model
        self.pixels: Pixels = pixels
        self.batch_size, self.timeout, self.retries = batch_size, timeout, retries
        self.token_env = token_env
        self.spec = RewardSpec(
            name=model or "remote",
            dims=tuple(dims),
            modality="any",
            scale=(-torch.inf, torch.inf),
            licence="that of the server's model",
            version=f"{url} {pixels}",
        )
        self._loaded = False

    def load(self) -> None:
        """Wait for the server to be ready, and take over its declaration.

        Raises:
            ValueError: it cannot be reached, failed to load, or serves other dimensions.
        """
        if self._loaded:
            return
        token = os.environ.get(self.token_env)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # a little longer than the server's deadline, so that its timeout message arrives
        self._server = _Connection(self.url, self.timeout + 2, headers)
        self._wait_until_ready()
        content = self._specs()
        specs = {row["name"]: row for row in content["models"]}
        if content["version"] != VERSION:
            raise ValueError(f"{self.url} speaks version {content['version']}, not {VERSION}")
        if self.model not in specs and not (self.model is None and len(specs) == 1):
            raise ValueError(f"{self.url} has no model {self.model!r}; it has {', '.join(specs)}")
        theirs = specs[self.model or next(iter(specs))]
        if tuple(theirs["dims"]) != self.spec.dims:
            raise ValueError(
                f"{self.url} gives {', '.join(theirs['dims'])}, not {', '.join(self.spec.dims)}"
            )
        low, high = theirs["scale"]
        self.spec = RewardSpec(
            name=self.spec.name,
            dims=self.spec.dims,
            modality=theirs["modality"],
            scale=(-torch.inf if low is None else low, torch.inf if high is None else high),
            licence=theirs["licence"],
            needs=tuple(theirs["needs"]),
            normalisation=theirs["normalisation"],
            version=f"{theirs['fingerprint']} {self.pixels}",
            columns=_columns(theirs),
        )
        self._loaded = True

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Request scores of `batch_size` samples at a time; group-wise models get all at once."""
        self.load()
        failed = self.spec.screen(batch)
        good = [i for i in range(len(batch)) if i not in failed]
        size = len(batch) if "groups" in self.spec.needs else self.batch_size
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        spread, extras = values.clone(), [{} for _ in range(len(batch))]
        for start in range(0, len(good), max(size, 1)):
            rows = good[start : start + size]
            answer = self._ask(batch if len(rows) == len(batch) else batch.take(rows))
            values[rows] = answer.values
            if answer.uncertainty is not None:
                spread[rows] = answer.uncertainty
            for row, extra in zip(rows, answer.extras, strict=False):
                extras[row] = dict(extra)
            failed |= {rows[i]: why for i, why in answer.reasons.items()}
        known = spread if spread.isfinite().any() else None
        return RewardOutput.build(self.spec, values, failed, known, extras if any(extras) else ())

    def _ask(self, batch: MediaBatch) -> RewardOutput:
        request = {"request_id": uuid.uuid4().hex, "model": self.model, "deadline_s": self.timeout}
        message, failures = pack_batch(batch, self.pixels, request), 0
        until = time.monotonic() + self.timeout
        while True:
            answer = self._post(message, len(batch))
            if isinstance(answer, RewardOutput):
                return answer
            if answer.retry_after is not None and time.monotonic() < until:
                time.sleep(answer.retry_after * random.uniform(1.0, 1.5))
                continue
            failures += 1
            if failures > self.retries:
                break
            time.sleep(min(0.25 * 2**failures, 8.0) * random.uniform(0.5, 1.0))
        nothing = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        reason = f"{self.url} failed {failures} times, last with {answer.why}"
        return RewardOutput.build(self.spec, nothing, dict.fromkeys(range(len(batch)), reason))

    def _post(self, message: Sequence[Piece], count: int) -> "RewardOutput | _Nothing":
        """Return scores, or why there are none yet; raise ValueError where a retry is useless."""
        try:
            reply = self._server.ask("POST", "/score", message, CONTENT_TYPE)
        except (OSError, HTTPException) as error:
            return _Nothing(f"{type(error).__name__} {error}")
        status, content = reply.status, reply.content
        why = f"status {status}: {content[:200].decode(errors='replace')}"
        if status not in (200, *_TRANSIENT):
            raise ValueError(f"{self.url} refuses the request, {why}")
        if status != 200:
            return _Nothing(why, reply.retry_after)
        try:
            return output_from_json(json.loads(content), self.spec, count)
        except ValueError as error:  # truncated, or not JSON
            return _Nothing(f"an answer that cannot be read: {error}")

    def _wait_until_ready(self) -> None:
        """Poll until the server has loaded its models; raise ValueError after `timeout`."""
        until = time.monotonic() + self.timeout
        while True:
            try:
                state = json.loads(self._server.ask("GET", "/health").content)
            except (OSError, HTTPException, ValueError) as error:
                raise ValueError(
                    f"reward server {self.url} cannot be reached ({type(error).__name__} {error})"
                ) from error
            mine = state["models"].get(self.model, state["status"])
            if mine == "ready":
                return
            if mine == "failed":
                raise ValueError(f"{self.url} has failed: {state['reasons']}")
            if time.monotonic() > until:
                raise ValueError(f"reward server {self.url} is not ready ({mine})")
            time.sleep(0.2)

    def _specs(self) -> dict[str, Any]:
        reply = self._server.ask("GET", "/spec")
        if reply.status != 200:
            why = reply.content[:200].decode(errors="replace")
            raise ValueError(f"{self.url}/spec: status {reply.status} {why}")
        return json.loads(reply.content)


def _columns(spec: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return the columns of the metadata that a server declares; one before 0.3 declares none."""
    return tuple(Column(one["name"], tuple(one["values"])) for one in spec.get("columns", ()))


@dataclass(frozen=True)
class _Nothing:
    """Says why there are no scores yet."""

    why: str
    retry_after: float | None = None
    """Seconds after which a server that has no room now wants to be asked again."""


@dataclass(frozen=True)
class _Reply:
    status: int
    content: bytes
    retry_after: float | None


class _Connection:
    """Keeps one connection to a server open, and reopens it where it broke."""

    def __init__(self, url: str, timeout: float, headers: dict[str, str]):
        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.http = kind(parts.netloc, timeout=timeout)
        self.path, self.headers = parts.path, headers

    def ask(
        self, method: str, path: str, body: Sequence[Piece] = (), content_type: str = ""
    ) -> _Reply:
        """Send a request and return the answer."""
        headers = self.headers | {"content-length": str(sum(map(len, body)))}
        headers |= {"content-type": content_type} if body else {}
        idle = self.http.sock is not None
        try:
            return self._once(method, path, body, headers)
        except (OSError, HTTPException):
            self.http.close()
            if not idle:
                raise
        try:  # the server may have closed a connection that was idle
            return self._once(method, path, body, headers)
        except (OSError, HTTPException):
            self.http.close()
            raise

    def _once(
        self, method: str, path: str, body: Sequence[Piece], headers: dict[str, str]
    ) -> _Reply:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered: too large
            self.http.request(method, self.path + path, iter(body), headers)
        reply = self.http.getresponse()
        seconds = reply.getheader("retry-after", "")
        wait = min(float(seconds), _LONGEST_WAIT_S) if seconds.isdecimal() else None
        return _Reply(reply.status, reply.read(), wait)

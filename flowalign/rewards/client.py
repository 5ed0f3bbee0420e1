"""Ask a reward server for the scores of one model; what a failure means, the caller decides."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
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
from flowalign.types import Column, MediaBatch, RewardOutput, RewardSpec

_LONGEST_WAIT_S = 30.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class NoAnswer:
    """Says why there are no scores yet."""

    why: str
    """Last status or error."""
    retry_after: float | None = None
    """Seconds after which a server that has no room now wants to be asked again."""
    disconnected: bool = False
    """Whether the connection broke, rather than the server answering."""


class RewardClient:
    """Keeps a connection to one model of a server.

    `timeout` is the number of seconds that the server has for a request.
    """

    def __init__(self, url: str, model: str | None, timeout: float, token: str | None):
        self.url, self.model, self.timeout = url, model, timeout
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # a little longer than the server's deadline, so that its timeout message arrives
        self._server = _Connection(url, timeout + 2, headers)

    def wait_until_ready(self) -> None:
        """Wait until the server has loaded the model, for `timeout` seconds at most.

        Raises:
            ValueError: It cannot be reached, has failed, or is not ready in time.
        """
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

    def spec(self, pixels: Pixels) -> RewardSpec:
        """Return the model's declaration, with its fingerprint and the pixels as the version.

        Raises:
            ValueError: The server speaks another version, or has no such model.
        """
        reply = self._server.ask("GET", "/spec")
        if reply.status != 200:
            why = reply.content[:200].decode(errors="replace")
            raise ValueError(f"{self.url}/spec: status {reply.status} {why}")
        content = json.loads(reply.content)
        specs = {row["name"]: row for row in content["models"]}
        if content["version"] != VERSION:
            raise ValueError(f"{self.url} speaks version {content['version']}, not {VERSION}")
        if self.model not in specs and not (self.model is None and len(specs) == 1):
            raise ValueError(f"{self.url} has no model {self.model!r}; it has {', '.join(specs)}")
        return _spec(specs[self.model or next(iter(specs))], pixels)

    def message(self, batch: MediaBatch, pixels: Pixels) -> list[Piece]:
        """Return the request for the scores of a batch; sent again, it is not scored again."""
        about = {"request_id": uuid.uuid4().hex, "model": self.model, "deadline_s": self.timeout}
        return pack_batch(batch, pixels, about)

    def score(
        self, message: Sequence[Piece], spec: RewardSpec, count: int
    ) -> "RewardOutput | NoAnswer":
        """Return the scores of `count` samples, or why there are none yet.

        Raises:
            ValueError: The server rejects the request, which would be useless to send again.
        """
        try:
            reply = self._server.ask("POST", "/score", message, CONTENT_TYPE)
        except TimeoutError as error:
            return NoAnswer(f"{type(error).__name__} {error}")
        except (OSError, HTTPException) as error:
            return NoAnswer(f"{type(error).__name__} {error}", disconnected=True)
        status, content = reply.status, reply.content
        why = f"status {status}: {content[:200].decode(errors='replace')}"
        if status not in (200, *_TRANSIENT):
            raise ValueError(f"{self.url} refuses the request, {why}")
        if status != 200:
            return NoAnswer(why, reply.retry_after)
        try:
            return output_from_json(json.loads(content), spec, count)
        except ValueError as error:  # truncated, or not JSON
            return NoAnswer(f"an answer that cannot be read: {error}")


def score_usable(
    spec: RewardSpec, batch: MediaBatch, size: int, ask: Callable[[MediaBatch], RewardOutput]
) -> RewardOutput:
    """Return the scores of a batch, of which `ask` gets `size` usable samples at a time."""
    failed = spec.screen(batch)
    good = [i for i in range(len(batch)) if i not in failed]
    values = torch.full((len(batch), len(spec.dims)), torch.nan)
    spread, extras, places = values.clone(), [{} for _ in range(len(batch))], None
    for start in range(0, len(good), max(size, 1)):
        rows = good[start : start + size]
        answer = ask(batch if len(rows) == len(batch) else batch.take(rows))
        values[rows] = answer.values
        if answer.uncertainty is not None:
            spread[rows] = answer.uncertainty
        for some in answer.maps.values():
            if places is None:
                places = torch.full((len(batch), *some.shape[1:]), torch.nan)
            places[rows] = some
        for row, extra in zip(rows, answer.extras, strict=False):
            extras[row] = dict(extra)
        failed |= {rows[i]: why for i, why in answer.reasons.items()}
    known = spread if spread.isfinite().any() else None
    return RewardOutput.build(spec, values, failed, known, extras if any(extras) else (), places)


def failed_answer(spec: RewardSpec, count: int, reason: str) -> RewardOutput:
    """Return the output of samples that all failed for one reason."""
    nothing = torch.full((count, len(spec.dims)), torch.nan)
    return RewardOutput.build(spec, nothing, dict.fromkeys(range(count), reason))


def _spec(row: Mapping[str, Any], pixels: Pixels) -> RewardSpec:
    """Return the declaration of a server, which gives no gradients."""
    low, high = row["scale"]
    return RewardSpec(
        name=row["name"],
        dims=tuple(row["dims"]),
        modality=row["modality"],
        scale=(-torch.inf if low is None else low, torch.inf if high is None else high),
        licence=row["licence"],
        needs=tuple(row["needs"]),
        normalisation=row["normalisation"],
        version=f"{row['fingerprint']} {pixels}",
        # a server before 0.3 declares no columns
        columns=tuple(Column(one["name"], tuple(one["values"])) for one in row.get("columns", ())),
        maps=row["maps"],
    )


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

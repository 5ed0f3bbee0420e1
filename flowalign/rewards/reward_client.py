"""Connect to one model of a reward server; callers decide how to treat failures."""

import math
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from flowalign.rewards.protocol import (
    CONTENT_TYPE,
    VERSION,
    Pieces,
    Pixels,
    output_from_json,
    pack_batch,
)
from flowalign.types import MAY_PASS, Column, MediaBatch, RewardOutput, RewardSpec
from flowalign.utils.files import parse_json

_LONGEST_WAIT_S = 30.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_PIECE, _LARGEST_ANSWER = 1 << 20, 1 << 30


@dataclass(frozen=True)
class NoAnswer:
    """Reason why there are no scores yet."""

    why: str
    """Last status or error."""
    retry_after: float | None = None
    """Seconds to wait before a retry, sent by an overloaded server; or None."""
    disconnected: bool = False
    """Whether the connection broke before an answer."""


class RewardClient:
    """Connection to one model of a server.

    `timeout` is the time limit of a request in seconds.
    """

    def __init__(self, url: str, model: str | None, timeout: float, token: str | None):
        self.url, self.model, self.timeout = url, model, timeout
        self._server = httpx2.Client(
            base_url=url,
            # Longer than the server's deadline, so that its timeout message arrives.
            timeout=timeout + 2,
            headers={"authorization": f"Bearer {token}"} if token else {},
            # Ignore proxies from the environment: they must not get requests to this machine.
            trust_env=False,
            verify=ssl.create_default_context() if url.startswith("https") else False,
        )

    def wait_until_ready(self) -> None:
        """Wait until the server has loaded the model, for at most `timeout` seconds.

        Raises:
            ValueError: The server cannot be reached, has failed, or is not ready in time.
        """
        until = time.monotonic() + self.timeout
        while True:
            with self._explain("/health"):
                state = parse_json(self._server.get("/health").content)
                mine = state["models"].get(self.model, state["status"])
                reasons = state["reasons"] if mine == "failed" else ""
            if mine == "ready":
                return
            if mine == "failed":
                raise ValueError(f"{self.url} has failed: {str(reasons)[:200]}")
            if time.monotonic() > until:
                raise ValueError(f"reward server {self.url} is not ready ({mine})")
            time.sleep(0.2)

    @contextmanager
    def _explain(self, path: str) -> Iterator[None]:
        """Raise ValueError if the server cannot be reached or gives an answer of another shape."""
        try:
            yield
        except httpx2.TransportError as error:
            raise ValueError(
                f"reward server {self.url} cannot be reached ({type(error).__name__} {error})"
            ) from error
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            what = f"{type(error).__name__} {error}"[:200]
            raise ValueError(f"{self.url}{path} is not that of a reward server ({what})") from error

    def spec(self, pixels: Pixels) -> RewardSpec:
        """Return the spec of the model; its version is the fingerprint and the pixel format.

        Raises:
            ValueError: The server has another protocol version, or does not have the model.
        """
        with self._explain("/spec"):
            reply = self._server.get("/spec")
        if reply.status_code != 200:
            raise ValueError(f"{self.url}/spec: status {reply.status_code} {reply.text[:200]}")
        with self._explain("/spec"):
            content = parse_json(reply.content)
            specs = {row["name"]: row for row in content["models"]}
            version = content["version"]
        if version != VERSION:
            raise ValueError(f"{self.url} speaks version {str(version)[:20]}, not {VERSION}")
        if self.model not in specs and not (self.model is None and len(specs) == 1):
            raise ValueError(f"{self.url} has no model {self.model!r}; it has {', '.join(specs)}")
        with self._explain("/spec"):
            return _spec_from_json(specs[self.model or next(iter(specs))], pixels)

    def pack(self, batch: MediaBatch, pixels: Pixels) -> Pieces:
        """Return a scoring request with a unique id, so a retry is not scored twice."""
        about = {"request_id": uuid.uuid4().hex, "model": self.model, "deadline_s": self.timeout}
        return pack_batch(batch, pixels, about)

    def score(self, message: Pieces, spec: RewardSpec, count: int) -> "RewardOutput | NoAnswer":
        """Return the scores of `count` samples, or the reason why there are none yet.

        Raises:
            ValueError: The server rejects the request, so a retry would be useless.
        """
        size = sum(map(len, message))
        headers = {"content-type": CONTENT_TYPE, "content-length": str(size)}
        try:
            content: Iterator[Any] = _split(message)
            with self._server.stream("POST", "/score", content=content, headers=headers) as reply:
                body = self._receive(reply)
        except httpx2.TransportError as error:
            broken = not isinstance(error, httpx2.TimeoutException)
            return NoAnswer(f"{type(error).__name__} {error}", disconnected=broken)
        why = f"status {reply.status_code}: {body[:200].decode(errors='replace')}"
        if reply.status_code in _TRANSIENT:
            wait = read_retry_after(reply.headers.get("retry-after", ""))
            return NoAnswer(why, None if wait is None else min(wait, _LONGEST_WAIT_S))
        if reply.status_code != 200:
            raise ValueError(f"{self.url} refuses the request, {why}")
        try:
            return output_from_json(parse_json(body), spec, count)
        except ValueError as error:  # truncated, or not JSON
            return NoAnswer(f"an answer that cannot be read: {error}")

    def _receive(self, reply: httpx2.Response) -> bytes:
        """Return the body of an answer; the timeout of the client is that of each read."""
        body, until = bytearray(), time.monotonic() + self.timeout + 2
        for chunk in reply.iter_bytes():
            body += chunk
            if time.monotonic() > until or len(body) > _LARGEST_ANSWER:
                raise httpx2.ReadTimeout(f"no complete answer within {self.timeout:g} s")
        return bytes(body)


def read_retry_after(header: str) -> float | None:
    """Return the seconds to wait by a `Retry-After`, a number or a date; None if it is neither."""
    if header.isdecimal():
        return float(header)
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def _split(message: Pieces) -> Iterator[bytes | memoryview]:
    """Yield small pieces; httpcore copies the rest of a piece after every partial write."""
    for piece in message:
        for start in range(0, len(piece), _PIECE):
            yield piece[start : start + _PIECE]


def failed_answer(spec: RewardSpec, count: int, reason: str) -> RewardOutput:
    """Return the output of `count` samples that all failed for the same reason, which may pass."""
    return RewardOutput.fail(spec, dict.fromkeys(range(count), f"{reason} {MAY_PASS}"))


def _spec_from_json(row: Mapping[str, Any], pixels: Pixels) -> RewardSpec:
    """Return the spec of a server's model, without gradients."""
    low, high = row["scale"]
    names = ("name", "modality", "licence", "normalisation", "maps")
    return RewardSpec(
        **{name: row[name] for name in names},
        dims=tuple(row["dims"]),
        scale=(-math.inf if low is None else low, math.inf if high is None else high),
        needs=tuple(row["needs"]),
        version=f"{row['fingerprint']} {pixels}",
        columns=tuple(Column(one["name"], tuple(one["values"])) for one in row["columns"]),
    )

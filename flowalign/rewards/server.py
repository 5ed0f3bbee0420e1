"""Serves reward models: the requests of many clients become batches of one model."""

import asyncio
import base64
import hmac
import io
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from flowalign.rewards.protocol import CONTENT_TYPE, VERSION, output_to_json, unpack_batch
from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput

REMEMBERED = 256
"""Number of requests whose answer is kept, in case their id is sent again."""


@dataclass(frozen=True)
class Limits:
    """Limits the load that a server accepts."""

    max_batch: int = 64
    """Largest number of samples per call of the model."""
    max_wait_ms: float = 3.0
    """Milliseconds that a request waits for others to share its batch."""
    deadline_s: float = 60.0
    """Seconds until a request fails, unless it asks for less."""
    max_request_mb: float = 256.0
    """Largest size of a request, in MiB; larger ones are refused with 413."""
    max_queue: int = 1024
    """Largest number of waiting requests; more are refused with 503."""

    def __post_init__(self) -> None:
        """Refuse limits that let no request through."""
        positive = (self.max_batch, self.deadline_s, self.max_request_mb, self.max_queue)
        if min(positive) <= 0 or self.max_wait_ms < 0:
            raise ValueError(f"server limits must be positive, got {self}")


@dataclass
class _Job:
    batch: MediaBatch
    deadline: float
    result: "Future[RewardOutput]" = field(default_factory=Future)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key that is equal for jobs that fit in one batch."""
        b = self.batch
        columns = (b.metadata, b.fps, b.references, b.groups)
        return (*b.media.shape[1:], b.media.dtype, *(bool(column) for column in columns))


class Batcher:
    """Runs one model in a thread, in batches of the requests of its queue."""

    def __init__(self, model: RewardModel, limits: Limits):
        self.model, self.limits, self.ready = model, limits, threading.Event()
        self.failure = ""
        self.jobs: queue.Queue[_Job] = queue.Queue(limits.max_queue)
        self.waiting: list[_Job] = []
        self.thread = threading.Thread(
            target=self._work, name=f"reward-{model.spec.name}", daemon=True
        )
        self.thread.start()

    @property
    def state(self) -> str:
        """State of the model: `loading`, `ready`, or `failed` if it did not load or has stopped."""
        return "failed" if self.failure else "ready" if self.ready.is_set() else "loading"

    def submit(self, batch: MediaBatch, deadline: float) -> "Future[RewardOutput]":
        """Queue a batch; returns a future of its scores. Raises queue.Full if too many wait."""
        job = _Job(batch, deadline)
        self.jobs.put_nowait(job)
        return job.result

    def _work(self) -> None:
        jobs: list[_Job] = []
        try:
            if isinstance(self.model, Loadable):
                self.model.load()
            self.ready.set()
            while True:
                jobs = self._next()
                self._answer(jobs)
        except ValueError as error:  # from loading: a batch that is refused has its own answer
            self.failure = str(error)
        finally:  # a defect of the model has its traceback in the log, and leaves no client waiting
            self.failure = (
                self.failure or f"{self.model.spec.name} has stopped; see the server's log"
            )
            with suppress(queue.Empty):
                while True:
                    self.waiting.append(self.jobs.get_nowait())
            for job in (*jobs, *self.waiting):
                _fail(job, RuntimeError(self.failure))

    def _answer(self, jobs: Sequence[_Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            if job.deadline < now:
                _fail(job, TimeoutError("its deadline passed before it was scored"))
        if alive := [job for job in jobs if job.deadline >= now]:
            self._score(alive)

    def _next(self) -> list[_Job]:
        """Take the oldest job, and others of its kind that wait or arrive soon."""
        if not self.waiting:
            self.waiting.append(self.jobs.get())
        until = time.monotonic() + self.limits.max_wait_ms / 1000
        while self._size(self.waiting[0].kind) < self.limits.max_batch:
            try:
                self.waiting.append(self.jobs.get(timeout=max(until - time.monotonic(), 0)))
            except queue.Empty:
                break
        return self._taken(self.waiting[0].kind)

    def _size(self, kind: tuple[Any, ...]) -> int:
        return sum(len(job.batch) for job in self.waiting if job.kind == kind)

    def _taken(self, kind: tuple[Any, ...]) -> list[_Job]:
        """Take the first jobs of a kind that fit in a batch, and at least one."""
        taken, left, size = [], [], 0
        for job in self.waiting:
            fits = not taken or size + len(job.batch) <= self.limits.max_batch
            if job.kind == kind and fits and not (taken and "groups" in self.model.spec.needs):
                taken.append(job)
                size += len(job.batch)
            else:
                left.append(job)
        self.waiting = left
        return taken

    def _score(self, jobs: Sequence[_Job]) -> None:
        try:
            output = self.model.score(MediaBatch.concat([job.batch for job in jobs]))
        except (ValueError, RuntimeError, OSError) as error:
            if isinstance(error, ValueError) and len(jobs) > 1:  # find the request that is refused
                for job in jobs:
                    self._score([job])
                return
            for job in jobs:
                _fail(job, error)
            return
        start = 0
        for job in jobs:
            stop = start + len(job.batch)
            with suppress(InvalidStateError):  # its client has gone
                job.result.set_result(output.slice(start, stop))
            start = stop


def _fail(job: _Job, error: Exception) -> None:
    with suppress(InvalidStateError):
        job.result.set_exception(error)


class Refused(Exception):
    """Refuses a request with an HTTP error status."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class Service:
    """Answers the requests of a server, independently of HTTP."""

    def __init__(self, models: Sequence[RewardModel], limits: Limits, token: str | None = None):
        names = [model.spec.name for model in models]
        if len(set(names)) < len(names):
            raise ValueError(f"two models are both named {max(names, key=names.count)!r}")
        self.batchers = {model.spec.name: Batcher(model, limits) for model in models}
        self.limits, self.token = limits, token
        self.answers: OrderedDict[str, asyncio.Future[dict[str, Any]]] = OrderedDict()

    def health(self) -> dict[str, Any]:
        """Return `ready`, `loading` or `failed` of each model, and the worst of them as status."""
        models = {name: batcher.state for name, batcher in self.batchers.items()}
        reasons = {name: b.failure for name, b in self.batchers.items() if b.failure}
        worst = max(models.values(), key=("ready", "loading", "failed").index)
        return {"status": worst, "models": models, "reasons": reasons}

    def specs(self) -> dict[str, Any]:
        """Return the version of the protocol, and each model's spec with its fingerprint."""
        models = [batcher.model.spec for batcher in self.batchers.values()]
        rows = [asdict(spec) | {"fingerprint": spec.fingerprint()} for spec in models]
        return {"version": VERSION, "models": _plain(rows)}

    def check_token(self, header: str | None) -> None:
        """Raise Refused unless the header carries the token."""
        given = (header or "").removeprefix("Bearer ")
        if self.token and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused(401, "a token is needed: send it as 'Authorization: Bearer TOKEN'")

    async def score(self, body: bytes, content_type: str) -> dict[str, Any]:
        """Answer a request; one that was sent before gets the same answer without new scoring."""
        try:
            binary = content_type.startswith(CONTENT_TYPE)
            batch, header = unpack_batch(body) if binary else batch_from_json(body)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        key = header.get("request_id")
        if not isinstance(key, str):
            return await self._scored(batch, header)
        if key not in self.answers:
            self.answers[key] = asyncio.ensure_future(self._scored(batch, header))
            while len(self.answers) > REMEMBERED:
                self.answers.popitem(last=False)
        try:
            return await asyncio.shield(self.answers[key])
        except Refused:
            self.answers.pop(key, None)  # a failure is not remembered
            raise

    async def _scored(self, batch: MediaBatch, header: Mapping[str, Any]) -> dict[str, Any]:
        batcher = self._batcher(header.get("model"))
        requested = header.get("deadline_s") or self.limits.deadline_s
        seconds = min(float(requested), self.limits.deadline_s)
        try:
            future = batcher.submit(batch, time.monotonic() + seconds)
            output = await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except queue.Full as error:
            raise Refused(503, f"{self.limits.max_queue} requests are waiting already") from error
        except TimeoutError as error:
            raise Refused(504, f"not scored within {seconds:g} seconds") from error
        except ValueError as error:
            raise Refused(422, str(error)) from error
        except (RuntimeError, OSError) as error:
            raise Refused(500, f"{type(error).__name__}: {error}") from error
        return output_to_json(output)

    def _batcher(self, name: object) -> Batcher:
        if name is None and len(self.batchers) == 1:
            batcher = next(iter(self.batchers.values()))
        elif name in self.batchers:
            batcher = self.batchers[str(name)]
        else:
            raise Refused(404, f"no model {name!r}; there are {', '.join(self.batchers)}")
        if batcher.failure:
            raise Refused(503, batcher.failure)
        return batcher


def batch_from_json(body: bytes) -> tuple[MediaBatch, dict[str, Any]]:
    """Decode a request `{"prompts": [...], "images": [base64 of PNG or WebP, ...]}`, for curl."""
    import json

    try:
        header = json.loads(body)
        pictures = [_picture(text) for text in header["images"]]
        prompts = header.get("prompts") or [""] * len(pictures)
        metadata = header.get("metadata", [])
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"need JSON with prompts and images: {error!r}") from error
    if len({p.shape for p in pictures}) != 1 or len(prompts) != len(pictures):
        raise ValueError("images of one request have one size, and each has its prompt")
    return MediaBatch(torch.stack(pictures)[:, None], prompts, metadata), header


def _picture(text: str) -> torch.Tensor:
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
        pixels = np.array(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error
    if picture.format not in ("PNG", "WEBP", "BMP"):
        raise ValueError(f"an image is {picture.format}; send PNG or lossless WebP")
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def _plain(value: Any) -> Any:
    """Replace the infinite bounds of scales by null, since JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and value in (float("inf"), -float("inf")) else value

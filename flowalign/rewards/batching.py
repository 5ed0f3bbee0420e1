"""Limit the load of a reward server, and batch the requests of many clients for one model."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from typing_extensions import override

from flowalign.rewards.checked import CheckedReward, RewardError, load
from flowalign.rewards.protocol import CONTENT_TYPE
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, require_ranges

MIB = 2**20
BYTES_PER_PIXEL = 3 * 4
"""Size of a decoded pixel: three channels in float32."""


class Refusal(Exception):
    """Request that is answered with an HTTP error status."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


def check_content_type(kind: str) -> None:
    """Raise Refusal unless a request has a content type of the protocol, which no form can send."""
    if not kind.startswith((CONTENT_TYPE, "application/json")):
        raise Refusal(415, f"send {CONTENT_TYPE} or application/json")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the load that a server accepts."""

    max_batch: PositiveInt = 64
    """Largest number of samples per call of the model."""
    max_wait_ms: NonNegativeFloat = 3.0
    """Milliseconds that a request waits for other requests to share its batch."""
    deadline: PositiveFloat = 60.0
    """Seconds until a request fails; a request may set a shorter deadline."""
    max_request_mb: PositiveFloat = 256.0
    """Largest size of a request, in MiB; larger requests get status 413."""
    max_image_mp: PositiveFloat = 16.0
    """Largest declared size of an image or frame, in megapixels; above it status 413."""
    max_request_mp: PositiveFloat = 100.0
    """Largest total size of the images and frames of a request, in megapixels; above it status
    413."""
    max_held_mb: PositiveFloat = 4096.0
    """Memory of all pending requests, in MiB; above it status 503."""
    max_requests: PositiveInt = 1024
    """Largest number of pending requests; above it status 503."""
    read_timeout: PositiveFloat = 30.0
    """Seconds until a request must have arrived; after it status 408."""

    def __post_init__(self) -> None:
        """Raise ValueError for limits that reject every request."""
        require_ranges(self, "limits")
        needed = self.max_request_mb + self.max_request_mp * 1e6 * BYTES_PER_PIXEL / MIB
        if self.max_held_mb < needed:
            remedy = "raise it, or lower max_request_mb or max_request_mp"
            needs = f"the largest request needs {needed:.0f}"
            raise ValueError(f"max_held_mb is {self.max_held_mb:g}; {needs}: {remedy}")

    def check_pixels(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the bytes of decoded images with shapes (..., channels, height, width).

        Raises:
            ValueError: An image has no pixels.
            Refusal: An image, or all images together, have too many pixels.
        """
        total = 0
        for *several, _, height, width in shapes:
            if height * width > self.max_image_mp * 1e6:
                most = f"an image may have {self.max_image_mp:g} MP"
                raise Refusal(413, f"{width} x {height} pixels; {most}")
            if 0 in (height, width):
                raise ValueError(f"{width} x {height} pixels are not an image")
            total += math.prod(several) * height * width
        if total > self.max_request_mp * 1e6:
            most = f"a request may have {self.max_request_mp:g}"
            raise Refusal(413, f"{total / 1e6:.1f} MP in total; {most}")
        return total * BYTES_PER_PIXEL


class Room:
    """Accounting of the memory of pending requests."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.held: dict[object, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def admit(self) -> Iterator[Callable[[int], None]]:
        """Admit a request inside the context; yield a function that reserves bytes for it.

        Both raise Refusal if a limit is exceeded.
        """
        request = object()
        with self._lock:
            if len(self.held) >= self.limits.max_requests:
                raise Refusal(503, f"{self.limits.max_requests} requests are waiting already")
            self.held[request] = 0
        try:
            yield partial(self._hold, request)
        finally:
            with self._lock:
                del self.held[request]

    def _hold(self, request: object, size: int) -> None:
        with self._lock:
            if sum(self.held.values()) + size > self.limits.max_held_mb * MIB:
                raise Refusal(503, f"waiting requests fill {self.limits.max_held_mb:g} MB")
            self.held[request] += size


@dataclass(eq=False)
class _Job:
    batch: MediaBatch
    deadline: float
    result: "Future[RewardOutput]" = field(default_factory=Future)

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what is equal for batches that can be concatenated."""
        b = self.batch
        columns = (b.metadata, b.fps, b.references, b.groups, b.masks)
        return (*b.media.shape[1:], b.media.dtype, *(bool(column) for column in columns))

    def begin(self) -> bool:
        """Mark the job as running and return True, unless it was cancelled or is too late."""
        if not self.result.set_running_or_notify_cancel():
            return False
        if self.deadline < time.monotonic():
            self.fail(TimeoutError("its deadline passed before it was scored"))
            return False
        return True

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.result.set_exception(error)


class Queue(ABC):
    """Source of scores of one reward that a server offers."""

    spec: RewardSpec
    """Declaration of the reward."""
    state: Literal["loading", "ready", "failed"] = "ready"
    failure = ""
    """Reason of the state `failed`, or empty."""
    late = "not scored"
    """Begin of the message about a deadline that has passed."""

    @abstractmethod
    def submit(self, batch: MediaBatch, deadline: float) -> "Future[RewardOutput]":
        """Queue a batch; return a future of its scores. Cancelling it removes the batch."""


class Batcher(Queue):
    """Thread that runs one model on batches, the earliest deadline first.

    An error of the model becomes the answer of the request that caused it; the thread continues.
    """

    def __init__(self, model: RewardModel, limits: Limits):
        self.model, self.limits = model, limits
        self.spec, self.state = model.spec, "loading"
        self.waiting: list[_Job] = []
        self._changed = threading.Condition()
        # A daemon thread, so that the process can exit while the model scores.
        threading.Thread(target=self._work, name=f"reward-{model.spec.name}", daemon=True).start()

    @override
    def submit(self, batch: MediaBatch, deadline: float) -> "Future[RewardOutput]":
        job = _Job(batch, deadline)
        job.result.add_done_callback(lambda _: self._drop_cancelled())
        with self._changed:
            self.waiting.append(job)
            self._changed.notify()
        if self.failure:
            job.fail(RuntimeError(self.failure))
        return job.result

    def _work(self) -> None:
        jobs: list[_Job] = []
        try:
            load(self.model)
            self.spec, self.state = self.model.spec, "ready"  # loading may complete the spec
            checked = CheckedReward(self.model)
            while True:
                jobs = [job for job in self._take() if job.begin()]
                if jobs:
                    self._score(checked, jobs)
        except (ValueError, OSError, RewardError) as error:
            self.failure = str(error)
        finally:  # answer all clients also after any other error, which goes to the log
            self.failure = self.failure or f"{self.spec.name} has stopped; see the server's log"
            self.state = "failed"
            for job in (*jobs, *self.waiting):
                job.fail(RuntimeError(self.failure))

    def _take(self) -> list[_Job]:
        """Wait for a job, then up to `max_wait_ms` for more, and take the next batch."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting)
            self._changed.wait_for(self._is_full, self.limits.max_wait_ms / 1000)
            batch = self._next_batch()
            self.waiting = [job for job in self.waiting if job not in batch]
        return batch

    def _is_full(self) -> bool:
        if not self.waiting:
            return True
        first = min(self.waiting, key=lambda job: job.deadline)
        return (
            sum(len(j.batch) for j in self.waiting if j.kind == first.kind) >= self.limits.max_batch
        )

    def _next_batch(self) -> list[_Job]:
        """Return the most urgent job, with further jobs that fit unless the model needs groups."""
        batch: list[_Job] = []
        for job in sorted(self.waiting, key=lambda job: job.deadline):
            size = sum(len(one.batch) for one in batch) + len(job.batch)
            if not batch or (job.kind == batch[0].kind and size <= self.limits.max_batch):
                batch.append(job)
            if "groups" in self.spec.needs:
                break
        return batch

    def _score(self, model: CheckedReward, jobs: Sequence[_Job]) -> None:
        """Answer jobs; if the model fails on the batch, score each half separately."""
        try:
            output = model.score(MediaBatch.concat([job.batch for job in jobs]))
        except RuntimeError as error:  # an error of the model, or out of memory for the batch
            half = len(jobs) // 2
            if half:
                self._score(model, jobs[:half])
                self._score(model, jobs[half:])
            else:
                jobs[0].fail(error)
            return
        start = 0
        for job in jobs:
            job.result.set_result(output.slice(start, start + len(job.batch)))
            start += len(job.batch)

    def _drop_cancelled(self) -> None:
        """Drop cancelled jobs from the queue, to free their memory immediately."""
        with self._changed:
            self.waiting = [job for job in self.waiting if not job.result.cancelled()]

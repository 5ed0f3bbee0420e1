"""Joins the requests of many clients to batches of one model."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flowalign.rewards.checked import CheckedReward, RewardError, load
from flowalign.rewards.limits import Limits
from flowalign.types import MediaBatch, RewardModel, RewardOutput


@dataclass(eq=False)
class _Job:
    batch: MediaBatch
    deadline: float
    result: "Future[RewardOutput]" = field(default_factory=Future)
    kind: tuple[Any, ...] = field(init=False)
    """Key that is equal for jobs that fit in one batch."""

    def __post_init__(self) -> None:
        b = self.batch
        columns = (b.metadata, b.fps, b.references, b.groups, b.masks)
        self.kind = (*b.media.shape[1:], b.media.dtype, *(bool(column) for column in columns))


class Batcher:
    """Runs one model in a thread; the earliest deadline is served first, with others of its kind.

    An error of the model is the answer of the request that caused it, and the model goes on.
    """

    def __init__(self, model: RewardModel, limits: Limits):
        self.model, self.limits, self.ready = model, limits, threading.Event()
        self.failure = ""
        self.waiting: list[_Job] = []
        self._arrival = threading.Condition()
        self.thread = threading.Thread(
            target=self._work, name=f"reward-{model.spec.name}", daemon=True
        )
        self.thread.start()

    @property
    def state(self) -> str:
        """State of the model: `loading`, `ready`, or `failed` if it did not load."""
        return "failed" if self.failure else "ready" if self.ready.is_set() else "loading"

    def submit(self, batch: MediaBatch, deadline: float) -> "Future[RewardOutput]":
        """Queue a batch; returns a future of its scores, and one that is cancelled leaves."""
        job = _Job(batch, deadline)
        job.result.add_done_callback(lambda _: self._forget(job))
        with self._arrival:
            self.waiting.append(job)
            self._arrival.notify()
        if self.failure:
            _fail(job, RuntimeError(self.failure))
        return job.result

    def _work(self) -> None:
        jobs: list[_Job] = []
        try:
            load(self.model)
            self.ready.set()
            checked = CheckedReward(self.model)
            while True:
                jobs = self._next()
                self._score(checked, jobs)
        except (ValueError, OSError, RewardError) as error:
            self.failure = str(error)
        finally:  # a defect here has its traceback in the log, and leaves no client waiting
            self.failure = (
                self.failure or f"{self.model.spec.name} has stopped; see the server's log"
            )
            for job in (*jobs, *self.waiting):
                _fail(job, RuntimeError(self.failure))

    def _next(self) -> list[_Job]:
        """Take the most urgent job, and others of its kind that wait or arrive soon."""
        with self._arrival:
            self._arrival.wait_for(lambda: self.waiting)
            until = time.monotonic() + self.limits.max_wait_ms / 1000
            self._arrival.wait_for(self._is_full, max(until - time.monotonic(), 0))
            taken = self._taken()
            for job in taken:
                self.waiting.remove(job)
        return [job for job in taken if self._begins(job)]

    @staticmethod
    def _begins(job: _Job) -> bool:
        """Mark a job as running, unless it was cancelled or is too late."""
        if not job.result.set_running_or_notify_cancel():
            return False
        if job.deadline < time.monotonic():
            _fail(job, TimeoutError("its deadline passed before it was scored"))
            return False
        return True

    def _is_full(self) -> bool:
        if not self.waiting:
            return True
        kind = min(self.waiting, key=_urgency).kind
        size = sum(len(job.batch) for job in self.waiting if job.kind == kind)
        return size >= self.limits.max_batch

    def _taken(self) -> list[_Job]:
        """Return the first jobs of a kind that fit in a batch, and at least one if any waits."""
        taken: list[_Job] = []
        size = 0
        for job in sorted(self.waiting, key=_urgency):
            if not taken:
                taken, size = [job], len(job.batch)
            elif "groups" in self.model.spec.needs:
                break
            elif job.kind == taken[0].kind and size + len(job.batch) <= self.limits.max_batch:
                taken.append(job)
                size += len(job.batch)
        return taken

    def _score(self, model: CheckedReward, jobs: Sequence[_Job]) -> None:
        """Answer jobs; if the model cannot score all, each half is scored alone, and so on."""
        if not jobs:
            return
        try:
            output = model.score(MediaBatch.concat([job.batch for job in jobs]))
        except RuntimeError as error:  # of a model's mistake, or memory for the whole batch
            half = len(jobs) // 2
            if half:
                self._score(model, jobs[:half])
                self._score(model, jobs[half:])
            else:
                _fail(jobs[0], error)
            return
        start = 0
        for job in jobs:
            stop = start + len(job.batch)
            job.result.set_result(output.slice(start, stop))
            start = stop

    def _forget(self, job: _Job) -> None:
        """Let go of the media of a job that was cancelled, rather than when its turn comes."""
        with self._arrival:
            if job.result.cancelled() and job in self.waiting:
                self.waiting.remove(job)


def _urgency(job: _Job) -> float:
    return job.deadline


def _fail(job: _Job, error: Exception) -> None:
    with suppress(InvalidStateError):
        job.result.set_exception(error)

"""Time the stages of a step of training, and measure what they take of the GPU's memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Literal

import torch

Stage = Literal["sample", "decode", "reward", "check"]
"""Stage of a step that is marked where it is computed: rollouts and completions; decoding; waiting
for rewards; checks of the first steps."""


class Stages:
    """Measures what each stage takes while it is open; what no mark claims belongs to `rest`.

    Stages of other threads, such as of rewards that are computed meanwhile, are not seen. The GPU
    is waited for where a stage begins and ends.
    """

    def __init__(self, rest: str):
        self.current = rest
        self.seconds: dict[str, float] = {}
        """Seconds by stage."""
        self.processor_seconds: dict[str, float] = {}
        """Seconds of processor time of this process by stage, whatever else the machine does."""
        self.peaks: dict[str, int] = {}
        """Most bytes of the GPU that were allocated at once, by stage; empty without a GPU."""
        self._since = self._used = 0.0
        self._token: Token[Stages | None] | None = None

    def __enter__(self) -> "Stages":
        self._token = _OPEN.set(self)
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        assert self._token is not None
        _OPEN.reset(self._token)

    def switch(self, stage: str) -> str:
        """End the current stage, begin another one, and return the one before."""
        self._end()
        before, self.current = self.current, stage
        self._begin()
        return before

    def _begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._since, self._used = time.perf_counter(), time.process_time()

    def _end(self) -> None:
        name = self.current
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated())
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - self._since
        used = self.processor_seconds.get(name, 0.0) + time.process_time() - self._used
        self.processor_seconds[name] = used


_OPEN: ContextVar[Stages | None] = ContextVar("stages", default=None)


def is_checking() -> bool:
    """Return whether the current stage is a check, for the `Stages` that are open."""
    stages = _OPEN.get()
    return stages is not None and stages.current == "check"


@contextmanager
def stage(name: Stage) -> Iterator[None]:
    """Mark what is computed inside as this stage, for the `Stages` that are open, if any are."""
    stages = _OPEN.get()
    if stages is None:
        yield
        return
    before = stages.switch(name)
    try:
        yield
    finally:
        stages.switch(before)

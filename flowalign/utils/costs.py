"""Count the costs of a run, and measure the time and the GPU memory of its stages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass
class Costs:
    """Counters of the costs of a run.

    A network evaluation is one pass of one latent through the denoiser; guidance needs two.
    """

    sampling_evaluations: int = 0
    """Number of evaluations without gradient: rollouts, completions and references."""
    training_evaluations: int = 0
    """Number of evaluations with gradient, each followed by a backward pass."""
    decodes: int = 0
    reward_calls: int = 0
    """Number of scored samples, counted once per reward model."""

    def __post_init__(self) -> None:
        self._fraction = 0.0

    @property
    def network_evaluations(self) -> int:
        """Return the number of all evaluations of the denoiser."""
        return self.sampling_evaluations + self.training_evaluations

    def count(self, denoiser: nn.Module) -> None:
        """Count every sample that passes through `denoiser` from now on."""

        def count(_: nn.Module, args: tuple, kwargs: dict) -> None:
            size = next(size for a in (*args, *kwargs.values()) if (size := _count_samples(a)))
            if torch.is_grad_enabled():
                self.training_evaluations += size
            else:
                self.sampling_evaluations += size

        denoiser.register_forward_pre_hook(count, with_kwargs=True)

    def count_share(self, share: float, samples: int) -> None:
        """Count `samples` passes through a share of the denoiser, without gradient.

        Fractions are carried over, so the sum of many calls is rounded once.
        """
        self._fraction += share * samples
        whole = round(self._fraction)
        self._fraction -= whole
        self.sampling_evaluations += whole

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Discard counts inside the context: evaluations and checks are no cost of training."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)


def _count_samples(argument: object) -> int:
    """Return the number of samples of a denoiser's argument; 0 for one that holds no samples.

    Z-Image's denoiser takes a list with one tensor per sample.
    """
    if isinstance(argument, list) and argument and all(isinstance(a, Tensor) for a in argument):
        return len(argument)
    return len(argument) if isinstance(argument, Tensor) and argument.ndim > 1 else 0


Stage = Literal["sample", "decode", "reward", "check"]
"""Stage of a step. sample: rollouts and completions. decode: decoding. reward: waiting for rewards.
check: checks of the first steps."""


class Stages:
    """Measurement of the stages of a step inside a context; unmarked work counts as `rest`.

    Stages in other threads, such as concurrent rewards, are not measured. The GPU is synchronised
    at the start and the end of a stage.
    """

    def __init__(self, rest: str):
        self.current = rest
        self.seconds: dict[str, float] = {}
        """Wall-clock seconds by stage."""
        self.processor_seconds: dict[str, float] = {}
        """CPU seconds of this process by stage."""
        self.peaks: dict[str, int] = {}
        """Peak bytes of allocated GPU memory by stage; empty without a GPU."""
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
        """End the current stage and begin another; return the name of the ended stage."""
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
    """Return whether the current stage of the open `Stages` is a check."""
    stages = _OPEN.get()
    return stages is not None and stages.current == "check"


@contextmanager
def stage(name: Stage) -> Iterator[None]:
    """Count the work inside the context as stage `name` of the open `Stages`, if any."""
    stages = _OPEN.get()
    if stages is None:
        yield
        return
    before = stages.switch(name)
    try:
        yield
    finally:
        stages.switch(before)

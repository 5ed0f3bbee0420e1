"""Train: split rows into micro-batches, backpropagate their losses, step, and average metrics.

A *source* makes the rows of an update, and a *loss* reads the columns of a micro-batch. This is the
only place that splits micro-batches, scales losses, calls backward, steps an optimizer and averages
statistics over processes. The rows of an update are light: they say which transitions, examples or
samples are trained. Heavy columns, such as states, are filled for one micro-batch at a time.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.distributed.processes import Processes
from flowalign.training.learner import Learner
from flowalign.training.recipe import Loop
from flowalign.training.update_checks import WeightChecks
from flowalign.types import Batch
from flowalign.types.losses import Loss

Losses = Callable[[Batch], Iterable[Loss]]
"""Function that yields the loss of a micro-batch, or several losses to backpropagate in turn."""
Report = Callable[[dict[str, float]], dict[str, float] | None]
"""Function of the means of an update before its step; None drops the gradient."""
Data = TypeVar("Data")


class Statistics:
    """Weighted sums of the statistics of losses on this process."""

    def __init__(self, processes: Processes, scale: float = 1.0):
        self.processes, self.scale = processes, scale
        """Processes to average over, and factor on all statistics (one over the updates)."""
        self.totals: dict[str, Tensor] = {}
        self.rows: dict[str, list[Tensor]] = {}

    def add(self, stats: Mapping[str, Tensor], share: float) -> None:
        """Add scalars, multiplied by the share of their rows, and statistics of single rows."""
        for name, value in stats.items():
            if value.ndim:
                self.rows.setdefault(name, []).append(value)
                continue
            value = share * self.scale * value.float().to(self.processes.device)
            self.totals[name] = self.totals.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Return means of scalars over the rows of all processes; all must call it."""
        values = torch.stack(list(self.totals.values())).tolist() if self.totals else []
        return self.processes.sum_by_name(dict(zip(self.totals, values, strict=True)))

    def gathered(self, name: str) -> Float[Tensor, "n *columns"]:
        """Return a statistic of single rows for the rows of all processes; all must call it."""
        return self.processes.gather(torch.cat(self.rows[name]))


class GradientObserver(ABC):
    """Observer of the gradients of micro-batches, which may replace their sum."""

    @abstractmethod
    def after(self, rows: Batch) -> None:
        """Observe the gradients after the backward pass of a micro-batch."""

    @abstractmethod
    def end(self) -> None:
        """Set the gradients after the last micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """Loss on rows, one summand of an update."""

    rows: Batch
    """Rows of this process."""
    total: int
    """Number of rows over all processes."""
    losses: Losses
    """Loss of a micro-batch; it fills the columns that it reads."""
    sums: bool = False
    """Whether a loss is a sum over its rows; if False, it is their mean."""
    micro_batch: int
    """Number of rows per micro-batch; `apart`, `together` and `once` are explained by
    `Batch.split`."""
    apart: Sequence[str] = ()
    together: str | None = None
    once: bool = False
    in_step: bool = False
    """Whether the loss gathers over processes. All processes then evaluate equal numbers of
    micro-batches, of which some may be empty."""
    observer: GradientObserver | None = None
    """Observer of the gradient of each micro-batch. None: gradients only add up."""
    statistics: Statistics | None = None
    """Sums for the statistics of several updates, which the caller averages. None: the update
    averages its own."""

    def micro_batches(self, processes: Processes) -> list[Batch]:
        """Return the micro-batches of this process."""
        parts = list(self.rows.split(self.micro_batch, self.apart, self.together, self.once))
        if self.in_step:
            most = int(processes.gather(torch.tensor([len(parts)])).max())
            none = self.rows.take(torch.zeros(0, dtype=torch.long))
            parts += [none] * (most - len(parts))
        return parts


def accumulate(learner: Learner, term: Term, statistics: Statistics) -> None:
    """Add the gradient of a term to that of the learner, and its statistics to the sums.

    An empty micro-batch has no gradient, but its loss may gather over processes.
    """
    for rows in term.micro_batches(learner.processes):
        share = (1 if term.sums else rows.num_rows) / term.total
        for loss, stats in term.losses(rows):
            if rows.num_rows:
                learner.backward(share * loss)
                statistics.add(stats, share)
        if term.observer:
            term.observer.after(rows)
    if term.observer:
        term.observer.end()


def make_update(learner: Learner, terms: Iterable[Term], report: Report = dict) -> dict[str, float]:
    """Make one optimizer step on the sum of terms, and return its metrics; all processes call it.

    A term without rows on any process is skipped, and there is no step without terms.
    """
    statistics, terms = Statistics(learner.processes), [term for term in terms if term.total]
    for term in terms:
        accumulate(learner, term, term.statistics or statistics)
    averaged = any(term.statistics is None for term in terms)
    metrics = report(statistics.means() if averaged else {})
    if metrics is None:
        learner.optimizer.zero_grad(set_to_none=True)
        return {}
    return metrics | (learner.step() if terms else {})


@dataclass(frozen=True)
class StepData(Generic[Data]):
    """Data of one training step, before its updates."""

    data: Data
    """Data that the updates of the loop read."""
    count: int
    """Number of samples, pairs or trajectories over all processes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of making the data, equal on all processes."""


class EngineLoop(Loop, Generic[Data]):
    """Loop of a kind of training: it makes the data of a step, and the terms of its updates."""

    checks: Sequence[WeightChecks]
    """Checks of the first updates, one for each learner."""
    stage: ClassVar[str] = "sample"
    """Stage that makes the data, whose time is logged."""
    rate: ClassVar[str] = "throughput"
    """Name of the metric with the number of samples per second."""

    @abstractmethod
    def data(self, steps: Sequence[int]) -> Iterator[StepData[Data]]:
        """Yield the data of each step; called once, before the first step."""

    @abstractmethod
    def train(self, step: int, data: Data) -> dict[str, float]:
        """Make the updates of a step, and return their metrics."""

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        steps = list(steps)
        for check in self.checks:
            check.begin()
        made = self.data(steps)
        for step in steps:
            start = time.perf_counter()
            found = next(made)
            ready = time.perf_counter()
            metrics = {f"timing/{self.stage}": ready - start, **found.metrics}
            metrics |= self.train(step, found.data)
            for check in self.checks:
                check.learner.end_step()
                check.after_update(metrics)
                metrics |= check.metrics()
            done = time.perf_counter()
            yield metrics | {
                "timing/update": done - ready,
                "timing/step": done - start,
                self.rate: found.count / (done - start),
            }

"""Train: split rows into micro-batches, backpropagate their losses, step, and average metrics.

A *source* makes the rows of an update, and a *loss* reads the columns of a micro-batch. This is the
only place that splits micro-batches, scales losses, calls backward, steps an optimizer and averages
statistics over processes. The rows of an update are light: they say which transitions, examples or
samples are trained. Heavy columns, such as states, are filled for one micro-batch at a time.

The first updates of all recipes are checked: gradients reach all kinds of parameters, and ranks
have equal weights.
"""

import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.distributed.processes import Processes
from flowalign.losses.gradient_squares import POLICY, PREFIX
from flowalign.training.learner import Learner
from flowalign.training.recipe import Loop
from flowalign.types import Batch
from flowalign.types.losses import Loss
from flowalign.utils.costs import stage
from flowalign.utils.errors import TrainingFailure

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
    after: Callable[[Batch], None] = lambda _: None
    """Function that observes, and may remove, the gradient after each micro-batch."""
    end: Callable[[], None] = lambda: None
    """Function that may set the gradient after the last micro-batch."""
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
        term.after(rows)
    term.end()


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


OnFailedCheck = Literal["raise", "warn"]
"""Action after a failed check. raise: the run ends. warn: the message is logged."""
MOST_STEPS = 10
"""Number of steps with a gradient after which every kind of parameter must have had one.

One step is not enough: the gradient of a LoRA's A is 0 until B has moved, and during a long warmup
the first values of B are 0 in half precision.
"""


class WeightChecks:
    """Checks of gradients and weights after the first steps with a gradient."""

    def __init__(
        self,
        learner: Learner,
        on_failure: OnFailedCheck,
        log: Callable[[str], None],
        further: Callable[[], None] = lambda: None,
    ):
        self.learner, self.on_failure, self.log = learner, on_failure, log
        self.further = further
        """Further check of the steps that count."""
        self.seen = 0
        self.warned = self.complete = False
        self.made, self.effective = self._counts()
        self.found: dict[str, float] = {}

    def begin(self) -> None:
        """Count updates from the current state of the learner, after a checkpoint was restored."""
        self.made, self.effective = self._counts()

    @stage("check")
    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Check that gradients reach all kinds of parameters and ranks agree, in the first steps.

        A step counts if it made an update with a gradient.
        """
        made, effective = self.made, self.effective
        self.made, self.effective = self._counts()
        if self.seen == MOST_STEPS or self.made == made:
            return
        if self.effective == effective:
            if not effective:
                self._report_no_gradient(metrics)
            return
        self.seen += 1
        if self.seen == 1:
            self._compare_with_eps(metrics)
        if not self.complete:
            self._check_kinds()
        if self.seen <= 2:
            self._compare_ranks()
        self.further()

    def metrics(self) -> dict[str, float]:
        """Return the measurements since the last call."""
        found, self.found = self.found, {}
        return found

    def fail(self, message: str) -> None:
        """Stop the run, or log the message."""
        if self.on_failure == "raise":
            raise TrainingFailure(f"{message}\n(Set on_failed_check: warn to continue anyway.)")
        self.log(message)

    def _counts(self) -> tuple[int, int]:
        made = self.learner.num_updates - self.learner.num_skipped
        return made, self.learner.num_with_gradient

    def _report_no_gradient(self, metrics: Mapping[str, float]) -> None:
        update = f"update {self.learner.num_updates} had no gradient"
        if metrics.get("zero_std_ratio") != 1:
            self.seen += 1
            self.fail(
                f"{update}: all weights were 0, or the loss does not reach the trained parameters."
            )
        elif not self.warned:
            self.warned = True
            self.log(
                f"warning: {update}, because the samples of each prompt have equal rewards "
                "(zero_std_ratio is 1)"
            )

    def _compare_with_eps(self, metrics: Mapping[str, float]) -> None:
        """Print the first gradient and Adam's eps, and warn if eps shortens the first update.

        Weights without a gradient are left out, as at first the matrices A of a LoRA.
        """
        learner = self.learner
        count = sum(learner.named[name].numel() for name in learner.reached)
        norm = min(metrics.get("optim/grad_norm", 0.0), learner.cfg.max_grad_norm)
        rms, eps = norm / sqrt(max(count, 1)), learner.cfg.eps
        self.found["check/gradient_rms"] = rms
        told = f"first gradient: root mean square {rms:.1e}, optimizer.eps {eps:g}"
        if 0 < rms < 100 * eps:
            told = (
                f"warning: {told}. So large an eps shortens updates: weights with this gradient "
                f"move by {rms / (rms + eps):.2g} of the learning rate, and smaller ones by less; "
                f"set optimizer.eps to {rms / 1e3:.0e}"
            )
        self.log(told)

    def _check_kinds(self) -> None:
        processes, names = self.learner.processes, self.learner.named.keys()
        mine = dict.fromkeys(self.learner.reached, 1.0)
        reached = processes.sum_by_name(mine).keys()  # sharded gradients may be elsewhere
        self.found["check/gradient_share"] = len(reached) / len(names)
        dead = _kind_names(names - reached) - _kind_names(reached)
        self.complete = self.seen > 1 and not dead
        if dead and self.seen == MOST_STEPS:
            self.fail(
                f"parameters of this kind had no gradient in {MOST_STEPS} steps, in any layer: "
                f"{', '.join(sorted(dead))}."
            )

    def _compare_ranks(self) -> None:
        difference = self.learner.processes.max_rank_difference(self.learner.parameters)
        self.found["check/max_rank_difference"] = difference
        if difference != 0:
            self.fail(
                "after an update the ranks hold different weights "
                f"(sums differ by {difference:.1e})."
            )


def _kind_names(names: Iterable[str]) -> set[str]:
    """Return parameter names without layer numbers.

    A single layer may be unused, but not all layers of one kind.
    """
    return {re.sub(r"\.\d+\.", ".*.", name) for name in names}


LARGEST_RATIO = 3.0
"""Gradient norm of an auxiliary term, relative to the policy term, above which a run warns."""


class AuxiliaryTerms:
    """Gradient-norm ratios of the auxiliary terms of a loss, with one warning per term."""

    def __init__(self, log: Callable[[str], None]):
        self.log = log
        self.warned: set[str] = set()

    def compare(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with ratios of gradient norms instead of squared norms.

        Norms are taken at the output of the network, as root mean squares over samples. A ratio
        above `LARGEST_RATIO` is logged once for each term. Without a gradient of the policy term
        there is no ratio.
        """
        squares = {n.removeprefix(PREFIX): x for n, x in metrics.items() if n.startswith(PREFIX)}
        policy = squares.pop(POLICY, 0.0)
        ratios = {name: sqrt(square / policy) for name, square in squares.items() if policy > 0}
        for name in sorted(ratios.keys() - self.warned):
            if ratios[name] > LARGEST_RATIO:
                self.warned.add(name)
                self.log(
                    f"warning: the gradient of the auxiliary term {name} is {ratios[name]:.3g} "
                    f"times that of the policy term (limit {LARGEST_RATIO:g}): lower its "
                    "coefficient, or the reward is hardly optimized"
                )
        rest = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
        return rest | {f"gradient_ratio/{name}": ratio for name, ratio in ratios.items()}


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

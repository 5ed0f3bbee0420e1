"""Run the matching loop.

    examples -> noise -> states -> residuals -> loss -> update

A training *step* takes one batch from the data source and makes `updates_per_step` x
`epochs_per_step` *updates* with it. An update accumulates the gradient over *micro-batches*.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import FlowSDE
from flowalign.losses.gradient_squares import POLICY, gradient_squares
from flowalign.training.engine import Accumulation, Part
from flowalign.training.learner import Learner
from flowalign.training.matching.displacement_checks import MatchingChecks
from flowalign.training.matching.dividing import divide_updates
from flowalign.training.matching.evaluation import measure_held_out
from flowalign.training.matching.example_parts import num_examples, prepare
from flowalign.training.matching.matching_settings import STEP_FIELD, MatchingSettings
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.norms import means_by_third, norm_ratios
from flowalign.training.matching.residuals import divergence, matching_residuals, select_fields
from flowalign.training.matching.source import BatchStream, StepExamples
from flowalign.training.recipe import Log, Loop
from flowalign.types import ALONE, Batch, LossContext, Trajectory
from flowalign.utils.seeds import generator

_MARGIN = "typical_margin"
_MARGIN_DECAY = 0.99


class MatchingLoop(Loop):
    """Loop that noises batches of examples and evaluates policy and reference on them."""

    def __init__(
        self,
        cfg: MatchingSettings,
        learner: Learner,
        stream: BatchStream,
        seed: int,
        log: Log = lambda _: None,
    ):
        self.cfg, self.learner, self.stream, self.seed = cfg, learner, stream, seed
        self.log = log
        self.held_out = stream.held_out()
        self.loss_state: dict[str, float] = {}
        """State of the loss and the checks that is kept between updates."""

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        checks = MatchingChecks(self.cfg, self.learner, self.loss_state, self.log)
        steps = list(steps)
        batches = self.stream.batches(steps)
        for step in steps:
            start = time.perf_counter()
            batch = next(batches)
            ready = time.perf_counter()
            metrics = dict(batch.metrics) | self._updates(batch, step, checks)
            checks.weights.after_update(metrics)
            done = time.perf_counter()
            metrics |= {
                "timing/data": ready - start,
                "timing/update": done - ready,
                "timing/step": done - start,
                "pairs_per_second": batch.total / (done - start),
            }
            yield metrics | checks.metrics()

    @override
    def evaluate(self) -> dict[str, float]:
        """Return the agreement with held-out pairs, relative to the reference."""
        return measure_held_out(self.cfg, self.learner, self.held_out, self.seed)

    @override
    def state(self) -> dict[str, Any]:
        return {"loss_state": self.loss_state, "data": self.stream.state()}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.loss_state = dict(state["loss_state"])
        self.stream.restore(state["data"])

    def _updates(self, batch: StepExamples, step: int, checks: MatchingChecks) -> dict[str, float]:
        """Make the updates of one step, and return the metrics of the last update."""
        cfg, learner, seed, metrics = self.cfg, self.learner, self.seed, {}
        examples = prepare(batch.examples, learner.policy, learner.processes.device)
        for epoch in range(cfg.epochs_per_step):
            key = seed, step, epoch
            levels = noise_for(
                cfg, learner.policy, examples, batch.first, key, batch.steps, batch.visited
            )
            draw = generator(seed, "order", step, epoch)
            for update in divide_updates(cfg, levels, batch.first, learner.processes, draw):
                parts = (levels.take(part) for part in update.parts)
                context = self._context(batch.visited)
                metrics = self._update(parts, update.total, checks, context)
        learner.end_step()
        return metrics

    def _context(self, visited: Trajectory | None) -> LossContext:
        """Return the context of an update on rollouts or on stored examples."""
        return LossContext(
            self.loss_state.get(_MARGIN, 0.0),
            self.learner.processes.gather,
            visited.kernel if visited else FlowSDE(),
            self.learner.policy.modality_sizes,
        )

    def _update(
        self, parts: Iterable[Batch], total: int, checks: MatchingChecks, context: LossContext
    ) -> dict[str, float]:
        """Make one update with this rank's micro-batches, and return metrics over all ranks.

        `total` is the number of noise levels over all ranks.
        """
        gradient = Accumulation(self.learner)
        gradient.add_all(
            Part(
                num_examples(part) / total,
                partial(micro_batch_loss, self.cfg, self.learner, part, context),
            )
            for part in parts
        )
        metrics = means_by_third(gradient.means())
        metrics = checks.terms.compare(metrics)
        checks.before_update(metrics)
        if "margin_abs" in metrics:
            remember_margin(self.loss_state, metrics["margin_abs"])
        checks.watch(metrics)
        return metrics | self.learner.step()


def micro_batch_loss(
    cfg: MatchingSettings,
    learner: Learner,
    part: Batch,
    context: LossContext = ALONE,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the recipe's loss with its SFT and KL terms, and detached scalars for the log."""
    states = cfg.states.build(part, learner.policy, learner.fields.get(STEP_FIELD))
    rows = matching_residuals(cfg, learner.policy, states, select_fields(cfg, learner))
    loss, stats = cfg.loss.loss(rows if cfg.loss.paired else rows.without("pair"), context)
    stats |= norm_ratios(rows) | {"weight": rows["weight"].mean()}
    if "old" in rows:
        stats["old_drift"] = (rows["policy"] - rows["old"]).square().mean()
    terms = {POLICY: loss}
    if cfg.sft:
        stats["sft"] = _winners(sample_error(rows["policy"]), rows)
        terms["sft"] = cfg.sft * stats["sft"]
    if cfg.kl:
        stats["kl"] = divergence(rows)
        terms["kl"] = cfg.kl * stats["kl"]
    stats |= gradient_squares(rows["policy"], terms)
    loss = sum(terms.values(), torch.zeros_like(loss))
    return loss, {name: value.detach() for name, value in stats.items()}


def remember_margin(loss_state: dict[str, float], size: float) -> None:
    """Update the running mean of margins, which starts at the first finite margin."""
    if not math.isfinite(size):
        return
    before = loss_state.get(_MARGIN)
    loss_state[_MARGIN] = (
        size if not before else _MARGIN_DECAY * before + (1 - _MARGIN_DECAY) * size
    )


def _winners(error: Tensor, rows: Batch) -> Tensor:
    """Return the mean error of winners, or of samples with undesirable samples counted as 0."""
    if "pair" in rows:
        return error.chunk(2)[0].mean()
    return (error * rows.get("desirable", 1)).mean()

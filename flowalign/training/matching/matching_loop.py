"""Run the matching loop.

    examples -> noise -> states -> residuals -> loss -> update

A training *step* takes one batch from the data source and makes `updates_per_step` x
`epochs_per_step` *updates* with it. An update accumulates the gradient over *micro-batches*.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import FlowSDE
from flowalign.losses.gradient_squares import POLICY, gradient_squares
from flowalign.training.engine import EngineLoop, StepData, Term, make_update
from flowalign.training.learner import Learner
from flowalign.training.matching.checks import MatchingChecks, measure_held_out
from flowalign.training.matching.matching_settings import STEP_FIELD, MatchingSettings
from flowalign.training.matching.noising import NoiseLevels, divide_updates, noise_for, prepare
from flowalign.training.matching.residuals import (
    divergence,
    matching_residuals,
    means_by_third,
    norm_ratios,
    select_fields,
)
from flowalign.training.matching.source import BatchStream, StepExamples
from flowalign.training.recipe import Log
from flowalign.types import ALONE, Batch, LossContext, Trajectory
from flowalign.types.losses import Loss
from flowalign.utils.seeds import generator

_MARGIN = "typical_margin"
_MARGIN_DECAY = 0.99


class MatchingLoop(EngineLoop[StepExamples]):
    """Loop that noises batches of examples and evaluates policy and reference on them."""

    stage, rate = "data", "pairs_per_second"

    def __init__(
        self,
        cfg: MatchingSettings,
        learner: Learner,
        stream: BatchStream,
        seed: int,
        log: Log = lambda _: None,
    ):
        self.cfg, self.learner, self.stream, self.seed = cfg, learner, stream, seed
        self.held_out = stream.held_out()
        self.loss_state: dict[str, float] = {}
        """State of the loss and the checks that is kept between updates."""
        self.updates = MatchingChecks(cfg, learner, self.loss_state, log)
        self.checks = [self.updates.weights]

    @override
    def data(self, steps: Sequence[int]) -> Iterator[StepData[StepExamples]]:
        batches = self.stream.batches(steps)
        return (StepData(batch, batch.total, batch.metrics) for batch in batches)

    @override
    def train(self, step: int, data: StepExamples) -> dict[str, float]:
        """Make the updates of one step, and return the metrics of the last update."""
        cfg, learner, seed, metrics = self.cfg, self.learner, self.seed, {}
        examples = prepare(data.examples, learner.policy, learner.processes.device)
        grouped = "group" in cfg.loss.needs
        for epoch in range(cfg.epochs_per_step):
            key = seed, step, epoch
            levels = noise_for(
                cfg, learner.policy, examples, data.first, key, data.steps, data.visited
            )
            draw = generator(seed, "order", step, epoch)
            for rows, total in divide_updates(
                levels, cfg.updates_per_step, grouped, data.first, learner.processes, draw
            ):
                term = Term(
                    rows=rows,
                    total=total,
                    losses=partial(self._losses, levels, self._context(data.visited)),
                    micro_batch=cfg.micro_batch,
                    together="group" if grouped else None,
                    in_step=grouped or cfg.loss.whole_batch,
                )
                metrics = make_update(learner, [term], self._report)
        return metrics | self.updates.metrics()

    @override
    def evaluate(self) -> dict[str, float]:
        """Return the agreement with held-out pairs, relative to the reference."""
        return measure_held_out(self.cfg, self.learner, self.held_out, self.seed)

    @override
    def state(self) -> dict[str, Any]:
        return {"loss_state": self.loss_state, "data": self.stream.state()}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.loss_state.clear()
        self.loss_state.update(state["loss_state"])
        self.stream.restore(state["data"])

    def _context(self, visited: Trajectory | None) -> LossContext:
        """Return the context of an update on rollouts or on stored examples."""
        return LossContext(
            self.loss_state.get(_MARGIN, 0.0),
            self.learner.processes.gather,
            visited.kernel if visited else FlowSDE(),
            self.learner.policy.modality_sizes,
        )

    def _losses(self, levels: NoiseLevels, context: LossContext, rows: Batch) -> list[Loss]:
        part = levels.take(rows["row"])
        return [micro_batch_loss(self.cfg, self.learner, part, context)]

    def _report(self, means: dict[str, float]) -> dict[str, float]:
        """Check the means of an update before its step, and return what is logged."""
        metrics = self.updates.terms.compare(means_by_third(means))
        self.updates.before_update(metrics)
        if "margin_abs" in metrics:
            remember_margin(self.loss_state, metrics["margin_abs"])
        self.updates.watch(metrics)
        return metrics


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

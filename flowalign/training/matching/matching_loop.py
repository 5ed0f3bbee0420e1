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
from flowalign.training.engine import (
    AuxiliaryTerms,
    EngineLoop,
    StepData,
    Term,
    WeightChecks,
    make_update,
)
from flowalign.training.learner import Learner
from flowalign.training.matching.matching_settings import STEP_FIELD, MatchingSettings
from flowalign.training.matching.noising import (
    NoiseLevels,
    divide_updates,
    noise_for,
    num_examples,
    prepare,
)
from flowalign.training.matching.residuals import (
    divergence,
    matching_residuals,
    means_by_third,
    norm_ratios,
    select_fields,
)
from flowalign.training.matching.source import BatchStream, StepExamples
from flowalign.training.matching.states import ForwardNoise
from flowalign.training.recipe import Log
from flowalign.types import ALONE, Batch, LossContext, Trajectory
from flowalign.types.losses import Loss
from flowalign.utils.seeds import generator

_TOLERANCE = 1e-3
_LARGEST_DRIFT = 1e-4
"""Tolerance of the mean squared difference between velocities of equal weights.

It is far above rounding errors in half precision and far below the effect of dropout. Velocities
have a mean square of about 1.
"""
_DISPLACED = "displaced_in_a_row"


class MatchingChecks:
    """Automatic checks of a run: before its first update, after its first ones, and at every one.

    Raises:
        ValueError: The recipe draws times outside the range that the model was trained on.
    """

    def __init__(
        self, cfg: MatchingSettings, learner: Learner, loss_state: dict[str, float], log: Log
    ):
        cfg.times.check(learner.policy.schedule)
        self.cfg, self.learner, self.loss_state, self.log = cfg, learner, loss_state, log
        self.weights = WeightChecks(learner, cfg.on_failed_check, log)
        self.terms = AuxiliaryTerms(log)

    def before_update(self, metrics: Mapping[str, float]) -> None:
        """Check before the first update that networks with equal weights give equal outputs."""
        if self.learner.num_updates:
            return
        if metrics.get("old_drift", 0.0) > _LARGEST_DRIFT:
            self.weights.fail(
                f"before any update the old policy's velocities differ from the policy's by "
                f"{metrics['old_drift']:.2g}, a mean square, though it has the same weights.\n"
                "Look for dropout, or for layers that change when they are evaluated."
            )
        expected = self.cfg.loss.at_start
        equal = self.cfg.reference.equals_policy and self.cfg.cold_start == "policy"
        if expected is None or not equal:
            return
        expected *= metrics["weight"]
        found = metrics["policy_loss"]
        self.weights.found["check/loss_at_start"] = found
        self.log(f"loss before the first update: {found:.6f}, of equal networks {expected:.6f}")
        if not abs(found - expected) <= _TOLERANCE * max(abs(expected), 1.0):
            self.weights.fail(
                f"before any update the loss is {found:.4f} instead of {expected:.4f}: "
                "policy and reference differ.\n"
                "Look for dropout, another precision, or weights that were loaded into one of them."
            )

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Log likelihood displacement once.

        This happens after `displacement_patience` consecutive updates in which the policy matched
        winners worse than the reference does.
        """
        worse = metrics.get("drift_chosen", 0.0) > 0
        in_a_row = self.loss_state.get(_DISPLACED, 0.0) + 1 if worse else 0.0
        self.loss_state[_DISPLACED] = in_a_row
        if self.cfg.displacement_patience and in_a_row == self.cfg.displacement_patience:
            self.log(
                f"likelihood displacement: for {self.cfg.displacement_patience} updates the policy "
                "has matched winners worse than the reference does (drift_chosen above 0); set "
                "recipe.sft, use the loss Safeguard, or lower the learning rate"
            )

    def metrics(self) -> dict[str, float]:
        """Return the number of updates in a row with likelihood displacement."""
        return {_DISPLACED: self.loss_state.get(_DISPLACED, 0.0)}


DRAWS = 4
"""Number of times and noises drawn for each pair."""


@torch.no_grad()
def measure_held_out(
    cfg: MatchingSettings,
    learner: Learner,
    examples: Batch | None,
    seed: int,
) -> dict[str, float]:
    """Return the implicit accuracy and the drift of errors on held-out pairs.

    Times and noises are the same at every call. A pair counts as correct if the policy's error
    relative to the reference is lower for the winner than for the loser, averaged over times. A tie
    counts as half. The result is empty if there are no pairs.
    """
    processes, rows = learner.processes, torch.zeros(0, 3)
    count = num_examples(examples) if examples is not None and "pair" in examples else 0
    first = int(processes.gather(torch.tensor([count]))[: processes.rank].sum())
    if examples is not None and count:
        data = prepare(examples, learner.policy, processes.device)
        draws = [
            _drifts(cfg, learner, noise_for(cfg, learner.policy, data, first, (seed, d, -1)))
            for d in range(DRAWS)
        ]
        rows = torch.stack(draws).mean(0)
    gathered = processes.gather(rows)
    if not len(gathered):
        return {}
    chosen, rejected, accurate = gathered.unbind(1)
    return {
        "eval/pairs/implicit_accuracy": float(_in_order(chosen, rejected).mean()),
        "eval/pairs/accuracy_per_draw": float(accurate.mean()),
        "eval/pairs/drift_chosen": float(chosen.mean()),
        "eval/pairs/drift_rejected": float(rejected.mean()),
    }


def _drifts(cfg: MatchingSettings, learner: Learner, noised: NoiseLevels) -> torch.Tensor:
    """Return [pairs, 3]: winner's drift, loser's drift, and 1 if the winner's drift is lower."""
    found, fields = [], {name: learner.fields[name] for name in ("reference", *cfg.teachers)}
    for rows in noised.rows().split(cfg.micro_batch):
        states = ForwardNoise().build(noised.take(rows["row"]), learner.policy, None)
        states = matching_residuals(cfg, learner.policy, states, fields)
        drift = sample_error(states["policy"]) - sample_error(states["reference"])
        chosen, rejected = drift.chunk(2)
        found.append(torch.stack([chosen, rejected, _in_order(chosen, rejected)], 1))
    return torch.cat(found).cpu()


def _in_order(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return (chosen < rejected).float() + 0.5 * (chosen == rejected).float()


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

"""The preference loop: examples -> noise -> matching errors -> loss -> update.

A *step* of the loop takes one batch of its source and makes `updates_per_step` x `epochs_per_step`
*updates* of it; an update accumulates the gradient over *micro-batches*.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flowalign.functional.matching import sample_error
from flowalign.training.learner import Learner
from flowalign.training.matching.batches import num_units, on, unpaired
from flowalign.training.matching.checks import Checks
from flowalign.training.matching.errors import (
    Noised,
    divergence,
    matching_errors,
    noise_for,
    personal,
)
from flowalign.training.matching.recipe import Preference
from flowalign.training.matching.source import Batch, Stream
from flowalign.types import Examples
from flowalign.utils.seeds import generator

_MARGIN = "typical_margin"
_MARGIN_DECAY = 0.99


def train_preference(
    cfg: Preference, learner: Learner, stream: Stream, seed: int, steps: Iterable[int]
) -> Iterator[dict[str, float]]:
    """Run the given steps of the loop, yielding the metrics of each.

    The caller owns logging, evaluation and checkpoints: they happen between two yields.
    """
    checks = Checks(cfg, learner)
    steps = list(steps)
    batches = stream.batches(steps)
    for step in steps:
        start = time.perf_counter()
        batch = next(batches)
        ready = time.perf_counter()
        metrics = dict(batch.metrics) | _updates(cfg, learner, batch, (seed, step), checks)
        checks.after_update()
        done = time.perf_counter()
        metrics |= {
            "timing/data": ready - start,
            "timing/update": done - ready,
            "timing/step": done - start,
            "pairs_per_second": batch.total / (done - start),
        }
        yield metrics | checks.metrics()


def _updates(
    cfg: Preference, learner: Learner, batch: Batch, key: tuple[int, int], checks: Checks
) -> dict[str, float]:
    """Make the updates of one step; returns the metrics of the last."""
    examples = personal(learner.policy, on(batch.examples, learner.processes.device))
    stop, metrics = batch.first + num_units(examples), {}
    for epoch in range(cfg.epochs_per_step):
        data = noise_for(cfg, learner.policy, examples, batch.first, (*key, epoch))
        order = torch.randperm(batch.total, generator=generator(key[0], "order", key[1], epoch))
        for part in order.tensor_split(min(cfg.updates_per_step, max(batch.total, 1))):
            if len(part):
                mine = part[(part >= batch.first) & (part < stop)] - batch.first
                parts = (data.take(some) for some in mine.split(cfg.micro_batch))
                metrics = update(cfg, learner, parts, len(part), checks)
    return metrics


def update(
    cfg: Preference, learner: Learner, parts: Iterable[Noised], total: int, checks: Checks
) -> dict[str, float]:
    """One optimizer update from my micro-batches of `total` pairs or samples; averages over all."""
    stats: dict[str, Tensor] = {}
    for part in parts:
        share = len(part.sigma) / total
        loss, seen = micro_batch_loss(cfg, learner, part)
        if not share:  # of a process without pairs, which takes part in what the loss gathers
            continue
        learner.backward(share * loss)
        for name, value in seen.items():
            stats[name] = stats.get(name, 0.0) + share * value.float().to(part.sigma.device)
    means = torch.stack(list(stats.values())).tolist() if stats else []
    metrics = learner.processes.total(dict(zip(stats, means, strict=True)))
    checks.before_update(metrics)
    if "margin_abs" in metrics:
        _remember_margin(learner, metrics["margin_abs"])
    checks.watch(metrics)
    return metrics | learner.step()


def micro_batch_loss(
    cfg: Preference, learner: Learner, part: Noised
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the recipe with what it adds to it, and detached scalars for the log."""
    reference = learner.reference if cfg.needs_reference else None
    errors = matching_errors(cfg, learner.policy, reference, part, learner.expert)
    examples = part.examples if cfg.loss.traits.paired else unpaired(part.examples)
    examples = replace(
        examples, gather=learner.processes.gather,
        typical_margin=learner.carried.get(_MARGIN, 0.0),
    )  # fmt: skip
    loss, stats = cfg.loss.loss(errors, examples)
    stats["weight"] = part.examples.weight.mean()
    if cfg.sft:
        stats["sft"] = _winners(sample_error(errors.policy), part.examples)
        loss = loss + cfg.sft * stats["sft"]
    if cfg.kl:
        stats["kl"] = divergence(errors)
        loss = loss + cfg.kl * stats["kl"]
    return loss, {name: value.detach() for name, value in stats.items()}


def _winners(error: Tensor, examples: Examples) -> Tensor:
    """Mean error of winners; of samples, of the desirable ones, the others counting as 0."""
    if examples.paired:
        return error.chunk(2)[0].mean()
    return (error * examples.desirable).mean()


def _remember_margin(learner: Learner, size: float) -> None:
    if not math.isfinite(size):
        return
    before = learner.carried.get(_MARGIN)
    learner.carried[_MARGIN] = (
        size if not before else _MARGIN_DECAY * before + (1 - _MARGIN_DECAY) * size
    )

"""Train a session: run its steps, evaluate, save, and stop between two steps on a signal."""

import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
import yaml

from flowalign.reports.run_report import write_report
from flowalign.runs.checks import (
    VelocityCheck,
    get_state,
    measure_distance,
    roll_back,
    sample_if_due,
    to_pictures,
    watch,
)
from flowalign.runs.config import Run
from flowalign.runs.planning import explain_shortage, memory_parts, plan, shorten_plan
from flowalign.runs.session import Session
from flowalign.training import checkpoint
from flowalign.training.held_out_evaluation import Evaluation, EvaluationResult, evaluate, save_grid
from flowalign.types import describe_conditioning, prompts_of
from flowalign.utils.console import Progress, is_main, table
from flowalign.utils.costs import Costs
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.files import write_text
from flowalign.utils.interrupts import stop_between_steps
from flowalign.utils.media.pixels import to_bytes, to_images
from flowalign.utils.run_events import hide_in_settings
from flowalign.utils.tracking import Tracker


def train(session: Session) -> dict[str, Any]:
    """Run the remaining steps, and write all files of the run directory; return the summary."""
    deque(iterate(session), maxlen=0)
    return session.summary


@contextmanager
def planned(run: Run) -> Iterator[None]:
    """Print the plan, and explain a GPU that runs out of memory inside the context.

    Raises:
        TrainingFailure: A GPU ran out of memory; the message names the large part and remedies.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    rows = plan(run, world)
    if is_main():
        table(f"plan of {run.output_dir}", shorten_plan(rows))
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingFailure(explain_shortage(error, memory_parts(run, world))) from error


def iterate(session: Session) -> Iterator[dict[str, float]]:
    """Yield the metrics of each remaining step; the summary is in the session at the end."""
    try:
        yield from _train(session)
    finally:
        if session.claim:
            session.claim.release()


def _train(session: Session) -> Iterator[dict[str, float]]:
    run, first = session.run, session.first_step
    if session.processes.is_main:
        settings = yaml.safe_load(hide_in_settings(session.config))
        session.tracker = Tracker(session.folder, run.trackers, first, settings)
    session.started = time.perf_counter()
    if not first:
        session.before = _evaluate(session, 0)
    elif session.owes_evaluation and first < run.num_steps:
        _evaluate(session, first)
    session.owes_evaluation = False
    with stop_between_steps() as stop:
        done, stopped_by = yield from _steps(session, stop)
        seconds = session.seconds
        if done > first or first == 0:
            _save(session, done, first_save=True)
        stopped_by = stopped_by or _read_stop_signal(session, stop)
        if stopped_by:
            _end(session, _summary(session, done, None, seconds, stopped_by))
            return
    after = _evaluate(session, done)
    if session.monitor and session.monitor.ends_run and (kept := roll_back(session, done)) < done:
        done = kept
        _save(session, done, first_save=False)
        after = _evaluate(session, done)
    _end(session, _summary(session, done, after, seconds, 0))


def _steps(
    session: Session, stop: Callable[[], int]
) -> Generator[dict[str, float], None, tuple[int, int]]:
    """Run the remaining steps; return the number of steps done, and the stop signal or 0.

    A stop signal skips an evaluation that is due; the resumed run makes up for it.
    """
    run, done = session.run, session.first_step
    steps, check = range(done, run.num_steps), VelocityCheck(session)
    with (
        Progress(run.num_steps, done, enabled=session.processes.is_main) as progress,
        session.messages.above(progress),
    ):
        for step, metrics in zip(steps, session.loop.run(steps), strict=True):
            done = step + 1
            metrics |= check.after_step() | _costs_so_far(session)
            if session.tracker:
                _report_step(session, session.tracker, progress, step, metrics)
            session.started += session.loop.draw()
            sample_if_due(session, done)
            yield metrics
            if done == run.num_steps:
                break
            if stopped_by := _read_stop_signal(session, stop):
                session.owes_evaluation = _is_due(run, done)
                return done, stopped_by
            if _evaluate_if_due(session, done):
                break
            if done % run.checkpoints.every == 0:
                _save(session, done, first_save=done == run.checkpoints.every)
            if stopped_by := _read_stop_signal(session, stop):
                return done, stopped_by
    return done, 0


def _report_step(
    session: Session, tracker: Tracker, progress: Progress, step: int, metrics: dict[str, float]
) -> None:
    """Write the metrics of a step, and show them."""
    tracker.log(step, metrics)
    progress.update(step, metrics)
    for callback in session.callbacks:
        callback.on_step(step + 1, metrics)


def _read_stop_signal(session: Session, stop: Callable[[], int]) -> int:
    """Return the stop signal that any process received, equal on all processes; 0 for none."""
    return int(session.processes.ungrouped.gather(torch.tensor([stop()])).max())


def _evaluate_if_due(session: Session, done: int) -> bool:
    """Evaluate if an evaluation is due; return whether reward hacking ends the run."""
    if not _is_due(session.run, done):
        return False
    _evaluate(session, done)
    return session.monitor is not None and session.monitor.ends_run


def _is_due(run: Run, done: int) -> bool:
    """Return whether an evaluation is due after `done` steps, before the last one."""
    every = run.evaluation.every if run.evaluation else 0
    return every > 0 and done % every == 0


def _end(session: Session, summary: dict[str, Any]) -> None:
    """Write the summary and the report, on the process that has a tracker."""
    if tracker := session.tracker:
        tracker.close()
        bounds = session.run.evaluation and session.run.evaluation.bounds
        summary["warnings"] = bounds.last_warnings(tracker.rows) if bounds else {}
        write_text(session.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_report(session.folder, rows=tracker.rows)
    session.summary = summary
    session.processes.barrier()  # no process exits while others still work


def _evaluate(session: Session, done: int) -> dict[str, float] | None:
    """Evaluate the EMA weights after `done` steps; the time is not counted as training time."""
    cfg, tracker = session.run.evaluation, session.tracker
    if cfg is None:
        return None
    costs, start = _costs_so_far(session), time.perf_counter()
    result = measure(session, cfg)
    metrics = dict(result.metrics)
    if tracker:
        metrics |= measure_distance(session, cfg, done, result)
        save_grid(session.folder, done, result)
    if session.monitor:
        watch(session, done, result.panel, get_state(session, _spent(session)))
    if tracker and cfg.bounds:
        for text in cfg.bounds.warnings(session.before or {}, metrics).values():
            session.messages(f"warning: {text}")
    if tracker and all(row.get("evaluated_after") != done for row in tracker.rows):
        tracker.log(max(done - 1, 0), metrics | costs | {"evaluated_after": done})
        write_report(session.folder, running=True, rows=tracker.rows)
        tracker.show(max(done - 1, 0), "samples", *to_pictures(result))
        _show(session, done, metrics, result)
    session.started += time.perf_counter() - start
    return metrics


def measure(session: Session, cfg: Evaluation) -> EvaluationResult:
    """Return the evaluation of the averaged weights, or of the current ones without an average."""
    learner, run = session.learner, session.run
    with session.costs.paused(), learner.averaged("ema") if learner.ema else nullcontext():
        result: EvaluationResult = evaluate(
            run.policy, session.rewards, cfg, session.processes, run.conditioning, learner.reference
        )
        return replace(result, metrics=result.metrics | session.loop.evaluate())


def _show(session: Session, done: int, metrics: dict[str, float], result: EvaluationResult) -> None:
    """Give an evaluation and its samples to the callbacks."""
    if not session.callbacks:
        return
    clips = [to_images(to_bytes(clip.cpu())) for clip in result.grid]
    images = clips if result.fps else [clip[0] for clip in clips]
    for callback in session.callbacks:
        callback.on_evaluation(done, metrics)
        callback.on_samples(done, images, prompts_of(result.grid_requests))


def _save(session: Session, done: int, first_save: bool) -> None:
    """Write a checkpoint, read it back, compare, and drop old ones."""
    spent = _spent(session)
    if not session.processes.is_main and not session.learner.is_sharded:
        session.processes.barrier()
        return
    root, cfg = session.folder / "checkpoints", session.run.checkpoints
    state = get_state(session, spent)
    try:
        folder = checkpoint.save(root, done, session.learner, session.config, state)
    except OSError as error:
        raise TrainingFailure(
            f"could not write checkpoint {done} to {root}: {error.strerror or error}.\n"
            "Everything saved before is intact; free space and continue with --resume."
        ) from error
    if not session.processes.is_main:
        session.processes.barrier()
        return
    if cfg.verify == "always" or (cfg.verify == "first_and_last" and first_save):
        with session.costs.paused():
            difference = session.run.policy.verify_weights(str(folder))
        if difference != 0:
            raise TrainingFailure(
                f"{folder} loads back with a difference of {difference:.1e} instead of 0: "
                "do not use it."
            )
    checkpoint.prune(root, cfg.keep)
    session.processes.barrier()


def _summary(
    session: Session, done: int, after: dict[str, float] | None, seconds: float, stopped_by: int
) -> dict[str, Any]:
    def plain(metrics: dict[str, float] | None) -> dict[str, float | None]:
        items = {k.removeprefix("eval/"): v for k, v in (metrics or {}).items()}
        return {k: v if math.isfinite(v) else None for k, v in items.items()}

    spent = _spent(session)
    asked = describe_conditioning(session.run.conditioning)
    return {
        "status": "interrupted" if stopped_by else "finished",
        "stopped_by": signal.Signals(stopped_by).name if stopped_by else None,
        "before": plain(session.before),
        "after": plain(after),
        "seconds": round(seconds, 2),
        "steps": done,
        "network_evaluations": spent.network_evaluations,
        **asdict(spent),
        **({"sampling_asks": asked} if asked else {}),
        "seed": session.run.seed,
        "processes": session.processes.ranks,
        "gpus": session.processes.ranks if session.processes.device.type == "cuda" else 0,
        **({"hacking": session.monitor.summary} if session.monitor else {}),
    }


def _spent(session: Session) -> Costs:
    """Return the costs summed over all processes."""
    local = torch.tensor([list(asdict(session.costs).values())])
    return Costs(*session.processes.gather(local).sum(0).tolist())


def _costs_so_far(session: Session) -> dict[str, float]:
    """Return the training cost over all processes and resumptions; every rank must call it."""
    seconds, spent = session.seconds, _spent(session)
    names = ("reward_calls", "decodes", "network_evaluations")
    counted = {f"cost/{name}": float(getattr(spent, name)) for name in names}
    return counted | {"cost/seconds": round(seconds, 3)}

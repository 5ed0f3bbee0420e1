"""A run from its configuration to its directory: build, train, evaluate, save, resume."""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flowalign.training import checkpoint
from flowalign.rewards.objectives import resumed
from flowalign.runs.config import AnyRun, PreferenceRun, Run
from flowalign.utils.console import Progress
from flowalign.utils.costs import Costs
from flowalign.distributed.processes import Processes, join
from flowalign.training.evaluate import Evaluated, evaluate, save_grid
from flowalign.training.policy_gradient.calibrate import is_calibrating
from flowalign.training.learner import Learner, TrainingFailure
from flowalign.runs.loops import Loop, make_loop
from flowalign.utils.files import write_text
from flowalign.reports.run_report import write_report
from flowalign.rewards.composite import Rewards
from flowalign.utils.tracking import Tracker


@dataclass
class Session:
    """Everything that a started run holds."""

    run: AnyRun
    config: str
    """The resolved YAML."""
    folder: Path
    processes: Processes
    learner: Learner
    rewards: Rewards
    costs: Costs
    say: Callable[[str], None]
    seconds_before: float = 0.0
    """Spent before this process resumed the run."""
    started: float = 0.0
    before: dict[str, float] | None = None

    @property
    def seconds(self) -> float:
        """Training time so far, evaluation left out."""
        return self.seconds_before + time.perf_counter() - self.started


def start(
    run: AnyRun, config: str, say: Callable[[str], None], resume: Path | None = None
) -> Session:
    """Load the weights and make the run directory; with `resume`, restore a checkpoint.

    Raises:
        ValueError: the directory already holds a run, or the checkpoint is not one of this run.
    """
    if run.threads:
        torch.set_num_threads(run.threads)
    processes = join(run.device)
    folder = Path(run.output_dir)
    begun = folder.exists() and any(folder.iterdir())
    if resume is None and begun and not is_calibrating(folder):
        raise ValueError(
            f"{folder} already holds a run and is not overwritten.\n"
            "Add --resume to go on with it, --overwrite to replace it, "
            "or choose another output_dir."
        )
    processes.barrier()
    costs = Costs()
    on_failure = run.recipe.on_failed_reward if isinstance(run, Run) else "raise"
    rewards = run.judges(costs, on_failure)
    rewards.load()
    run.policy.load(processes.device)
    updates = run.num_steps * run.recipe.updates
    ema = (run.ema.decay, run.ema.every) if run.ema else None
    costs.watch(run.policy.denoiser)  # before the learner copies it for a reference
    learner = Learner(run.policy, run.optimizer, processes, updates, ema)
    if isinstance(run, PreferenceRun):
        run.recipe.reference.build(learner)
        learner.expert = run.recipe.expert and run.recipe.expert.field(learner)
    session = Session(run, config, folder, processes, learner, rewards, costs, say)
    if processes.is_main:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.yaml", config)
    session.started = time.perf_counter()
    return session


def train(session: Session, resume: Path | None = None) -> dict[str, Any]:
    """Run the steps that are left, and write all that README's "What a run leaves" lists."""
    first = _resume(session, resume) if resume else 0
    run = session.run
    tracker = (
        Tracker(session.folder, run.trackers, first if resume else None)
        if session.processes.is_main
        else None
    )
    if not resume:
        session.started = time.perf_counter()  # the evaluation before training has cost nothing
    loop = make_loop(run, session.learner, session.rewards, session.folder, session.say)
    if not resume:
        session.before = _evaluate(session, tracker, loop, 0)
    steps = range(first, run.num_steps)
    after, status, done = None, "finished", first
    with (
        _stop_on_ctrl_c() as stop,
        Progress(run.num_steps, first, enabled=session.processes.is_main) as progress,
    ):
        for step, metrics in zip(steps, loop.run(steps), strict=True):
            done = step + 1
            _show(session, tracker, progress, step, metrics | _costs_so_far(session))
            session.started += loop.draw()
            if done == run.num_steps:
                break
            after = _between_steps(session, tracker, loop, done)
            if session.processes.gather(torch.tensor([stop()])).any():
                status = "interrupted"
                break
    seconds = session.seconds
    if done > first or first == 0:
        _save(session, done, first_save=True)
    if status == "finished":
        after = _evaluate(session, tracker, loop, done)
    summary = _summary(session, done, after, seconds, status)
    _close(session.folder, tracker, summary)
    return summary


def _show(
    session: Session,
    tracker: Tracker | None,
    progress: Progress,
    step: int,
    metrics: dict[str, float],
) -> None:
    """The notes of a step and its metrics."""
    while session.learner.notes:
        progress.note(session.learner.notes.pop(0))
    if tracker:
        tracker.log(step, metrics)
        progress.update(step, metrics)


def _close(folder: Path, tracker: Tracker | None, summary: dict[str, Any]) -> None:
    """What is written at the end, by the one process that has a tracker."""
    if tracker is None:
        return
    tracker.close()
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_report(folder)


def _resume(session: Session, resume: Path) -> int:
    loop = checkpoint.restore(resume, session.learner)
    if session.processes.is_main:  # the checkpoint holds the sum over processes
        for name, value in loop["costs"].items():
            setattr(session.costs, name, value)
    session.seconds_before = loop["seconds"]
    session.before = loop["before"]
    if isinstance(session.run, Run):
        thresholds, rewards = session.run.recipe.thresholds, session.rewards
        rewards.multipliers = resumed(thresholds, rewards, loop["multipliers"])
    session.started = time.perf_counter()
    session.say(f"resumed {resume} after {loop['step']} steps")
    return loop["step"]


def _between_steps(
    session: Session, tracker: Tracker | None, loop: Loop, done: int
) -> dict[str, float] | None:
    """Evaluate and save where it is due; the metrics of the evaluation."""
    cfg, every = session.run.evaluation, session.run.checkpoints.every
    due = cfg and cfg.every and done % cfg.every == 0
    after = _evaluate(session, tracker, loop, done) if due else None
    if done % every == 0:
        _save(session, done, first_save=done == every)
    return after


def _evaluate(
    session: Session, tracker: Tracker | None, loop: Loop, done: int
) -> dict[str, float] | None:
    """Evaluate the EMA weights after `done` steps; its time is no training time."""
    cfg = session.run.evaluation
    if cfg is None:
        return None
    costs, start = _costs_so_far(session), time.perf_counter()
    ema = session.learner.ema
    with session.costs.uncounted(), ema.applied() if ema else nullcontext():
        result: Evaluated = evaluate(session.run.policy, session.rewards, cfg, session.processes)
        metrics = result.metrics | loop.evaluate()
    if tracker:
        save_grid(session.folder, done, result)
        tracker.log(max(done - 1, 0), metrics | costs | {"evaluated_after": done})
    session.started += time.perf_counter() - start
    return metrics


def _save(session: Session, done: int, first_save: bool) -> None:
    """Write, re-read and compare a checkpoint; drop old ones."""
    spent = _spent(session)
    if not session.processes.is_main:
        session.processes.barrier()
        return
    root, cfg = session.folder / "checkpoints", session.run.checkpoints
    loop = {"costs": asdict(spent), "seconds": session.seconds, "before": session.before}
    loop["multipliers"] = session.rewards.multipliers and session.rewards.multipliers.state()
    try:
        folder = checkpoint.save(root, done, session.learner, session.config, loop)
    except OSError as error:
        raise TrainingFailure(
            f"could not write checkpoint {done} to {root}: {error.strerror or error}.\n"
            "Everything saved before is intact; free space and go on with --resume."
        ) from error
    if cfg.verify == "always" or (cfg.verify == "first_and_last" and first_save):
        with session.costs.uncounted():
            difference = session.run.policy.verify_weights(str(folder))
        if difference != 0:
            raise TrainingFailure(
                f"{folder} loads back with a difference of {difference:.1e} instead of 0: "
                "do not trust it."
            )
    checkpoint.prune(root, cfg.keep)
    session.processes.barrier()


def _summary(
    session: Session, done: int, after: dict[str, float] | None, seconds: float, status: str
) -> dict[str, Any]:
    def plain(metrics: dict[str, float] | None) -> dict[str, float | None]:
        items = {k.removeprefix("eval/"): v for k, v in (metrics or {}).items()}
        return {k: v if math.isfinite(v) else None for k, v in items.items()}

    spent = _spent(session)
    return {
        "status": status,
        "before": plain(session.before),
        "after": plain(after),
        "seconds": round(seconds, 2),
        "steps": done,
        "network_evaluations": spent.network_evaluations,
        **asdict(spent),
        "seed": session.run.seed,
        "processes": session.processes.world,
    }


def _spent(session: Session) -> Costs:
    """The costs of all processes together."""
    mine = torch.tensor([list(asdict(session.costs).values())])
    return Costs(*session.processes.gather(mine).sum(0).tolist())


def _costs_so_far(session: Session) -> dict[str, float]:
    """What training has cost over all processes and resumptions; every rank must ask at once."""
    seconds, spent = session.seconds, _spent(session)
    names = ("reward_calls", "decodes", "network_evaluations")
    counted = {f"cost/{name}": float(getattr(spent, name)) for name in names}
    return counted | {"cost/seconds": round(seconds, 3)}


def remove(folder: Path) -> None:
    """Delete a run directory, for --overwrite. Raises ValueError if it does not look like one."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} holds no config.yaml, so it is no run directory and is not deleted"
        )
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C asks to stop after the current step; the second stops at once."""
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread: whoever runs us there handles Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, previous)

"""Run a run file: build, train, evaluate, save, resume."""

import json
import math
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flowalign.distributed.processes import Processes, join
from flowalign.reports.run_report import write_report
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.training import checkpoint
from flowalign.training.evaluate import Evaluated, evaluate, save_grid
from flowalign.training.learner import Learner, TrainingFailure
from flowalign.training.recipe import Log, Loop, Recipe
from flowalign.utils.console import Messages, Progress
from flowalign.utils.costs import Costs
from flowalign.utils.files import write_text
from flowalign.utils.interrupts import stop_on_ctrl_c
from flowalign.utils.strict_yaml import parse_yaml, read_yaml
from flowalign.utils.tracking import FILE, Tracker


@dataclass
class Session:
    """Holds everything that a started run needs."""

    run: Run
    """Run file."""
    config: str
    """Complete settings as YAML."""
    folder: Path
    """Run directory."""
    processes: Processes
    """Processes that train together."""
    learner: Learner
    """Policy with its optimizer and averages."""
    rewards: Rewards
    """Loaded reward models."""
    loop: Loop
    """Loop that the recipe opened."""
    costs: Costs
    """Counts of this process."""
    log: Log
    """Shows messages to a person."""
    messages: Messages
    """Log of the loop, shown above the progress bar."""
    seconds_before: float = 0.0
    """Training time in seconds before `started`: of the resumed run, and of opening the loop."""
    started: float = 0.0
    """Start of the steps on the clock of `time.perf_counter`, moved on by pauses."""
    before: dict[str, float] | None = None
    """Metrics of the evaluation before training; None without evaluation."""
    first_step: int = 0
    """Index of the first step of this process."""

    @property
    def seconds(self) -> float:
        """Return the training time so far, without evaluations."""
        return self.seconds_before + time.perf_counter() - self.started


def start(run: Run, config: str, log: Log, resume: Path | None = None) -> Session:
    """Load the weights, open the loop and make the run directory; with `resume`, restore.

    Raises:
        ValueError: The directory already holds a run, or the checkpoint is not one of this run.
    """
    if run.threads:
        torch.set_num_threads(run.threads)
    processes = join(run.device)
    folder = Path(run.output_dir)
    if resume is None:
        refuse_begun(folder, run.recipe)
    processes.barrier()
    costs, messages = Costs(), Messages(log)
    rewards = run.build_rewards(costs)
    if processes.is_main:  # the others have no progress bar, and tell of long waits directly
        rewards.log = messages
    rewards.load()
    run.policy.load(processes.device)
    ema = (run.ema.decay, run.ema.every) if run.ema else None
    costs.count(run.policy.denoiser)  # before the learner copies it for a reference
    updates = run.num_steps * run.recipe.updates
    learner = Learner(run.policy, run.optimizer, processes, updates, ema)
    if processes.is_main:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        _write_config(folder / "config.yaml", config)
    before_opening = time.perf_counter()
    loop = run.recipe.open(run.context(rewards), learner, folder, messages)
    session = Session(
        run,
        config,
        folder,
        processes,
        learner,
        rewards,
        loop,
        costs,
        log,
        messages,
        seconds_before=time.perf_counter() - before_opening,  # what the loop encodes is training
    )
    if resume:
        _resume(session, resume)
    return session


def train(session: Session) -> dict[str, Any]:
    """Run the steps that are left, and write all files of the run directory."""
    run, first = session.run, session.first_step
    tracker = (
        Tracker(session.folder, run.trackers, first or None) if session.processes.is_main else None
    )
    session.started = time.perf_counter()
    if not first:
        session.before = _evaluate(session, tracker, 0)
    steps = range(first, run.num_steps)
    after, status, done = None, "finished", first
    with (
        stop_on_ctrl_c() as stop,
        Progress(run.num_steps, first, enabled=session.processes.is_main) as progress,
        session.messages.above(progress),
    ):
        for step, metrics in zip(steps, session.loop.run(steps), strict=True):
            done = step + 1
            metrics |= _costs_so_far(session)
            if tracker:
                tracker.log(step, metrics)
                progress.update(step, metrics)
            session.started += session.loop.draw()
            if done == run.num_steps:
                break
            after = _between_steps(session, tracker, done)
            if session.processes.gather(torch.tensor([stop()])).any():
                status = "interrupted"
                break
    seconds = session.seconds
    if done > first or first == 0:
        _save(session, done, first_save=True)
    if status == "finished":
        after = _evaluate(session, tracker, done)
    summary = _summary(session, done, after, seconds, status)
    _close(session.folder, tracker, summary)
    return summary


def _write_config(path: Path, config: str) -> None:
    """Write the settings; equal ones that are there keep their comments about origins."""
    if not path.is_file() or read_yaml(path) != parse_yaml(config):
        write_text(path, config)


def is_opening(folder: Path, recipe: Recipe) -> bool:
    """Tell whether a run was killed while its recipe opened, so that it goes on by itself."""
    begun = any((folder / name).exists() for name in recipe.open_files)
    trained = (folder / FILE).exists() or any((folder / "checkpoints").glob("*"))
    return begun and not trained


def refuse_begun(folder: Path, recipe: Recipe) -> None:
    """Raise ValueError if a folder holds a run that did not just begin to open."""
    begun = folder.exists() and any(folder.iterdir())
    if begun and not is_opening(folder, recipe):
        raise ValueError(
            f"{folder} already holds a run and is not overwritten.\n"
            "Add --resume to go on with it, --overwrite to replace it, "
            "or choose another output_dir."
        )


def _close(folder: Path, tracker: Tracker | None, summary: dict[str, Any]) -> None:
    """Write the summary and the report, on the one process that has a tracker."""
    if tracker is None:
        return
    tracker.close()
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_report(folder)


def _resume(session: Session, resume: Path) -> None:
    state = checkpoint.restore(resume, session.learner)
    session.loop.restore(state["loop"])
    if session.processes.is_main:  # the checkpoint holds the sum over processes
        for name, value in state["costs"].items():
            setattr(session.costs, name, getattr(session.costs, name) + value)
    session.seconds_before += state["seconds"]
    session.before, session.first_step = state["before"], state["step"]
    session.log(f"resumed {resume} after {state['step']} steps")


def _between_steps(session: Session, tracker: Tracker | None, done: int) -> dict[str, float] | None:
    """Evaluate and save if it is due; return the metrics of the evaluation."""
    cfg, every = session.run.evaluation, session.run.checkpoints.every
    due = cfg and cfg.every and done % cfg.every == 0
    after = _evaluate(session, tracker, done) if due else None
    if done % every == 0:
        _save(session, done, first_save=done == every)
    return after


def _evaluate(session: Session, tracker: Tracker | None, done: int) -> dict[str, float] | None:
    """Evaluate the EMA weights after `done` steps; the time counts as no training time."""
    cfg = session.run.evaluation
    if cfg is None:
        return None
    costs, start = _costs_so_far(session), time.perf_counter()
    ema = session.learner.ema
    with session.costs.paused(), ema.applied() if ema else nullcontext():
        result: Evaluated = evaluate(session.run.policy, session.rewards, cfg, session.processes)
        metrics = result.metrics | session.loop.evaluate()
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
    state = {
        "costs": asdict(spent),
        "seconds": session.seconds,
        "before": session.before,
        "loop": session.loop.state(),
    }
    try:
        folder = checkpoint.save(root, done, session.learner, session.config, state)
    except OSError as error:
        raise TrainingFailure(
            f"could not write checkpoint {done} to {root}: {error.strerror or error}.\n"
            "Everything saved before is intact; free space and go on with --resume."
        ) from error
    if cfg.verify == "always" or (cfg.verify == "first_and_last" and first_save):
        with session.costs.paused():
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
    """Return the costs of all processes together."""
    local = torch.tensor([list(asdict(session.costs).values())])
    return Costs(*session.processes.gather(local).sum(0).tolist())


def _costs_so_far(session: Session) -> dict[str, float]:
    """Return what training has cost over all processes and resumptions; all ranks must call it."""
    seconds, spent = session.seconds, _spent(session)
    names = ("reward_calls", "decodes", "network_evaluations")
    counted = {f"cost/{name}": float(getattr(spent, name)) for name in names}
    return counted | {"cost/seconds": round(seconds, 3)}


def remove(folder: Path) -> None:
    """Delete a run directory, for --overwrite; raise ValueError if it does not look like one."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} holds no config.yaml, so it is no run directory and is not deleted"
        )
    shutil.rmtree(folder, ignore_errors=True)

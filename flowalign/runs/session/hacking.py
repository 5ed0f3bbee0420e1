"""React to reward hacking: keep the best checkpoint, warn, stop, or return to it."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flowalign.runs.session.session import Session
from flowalign.training import checkpoint
from flowalign.training.checkpoint_files import PREFIX, list_by_step
from flowalign.training.watch import Panel
from flowalign.utils.costs import Costs
from flowalign.utils.run_events import notify

BEST = "best"
"""Folder of the best checkpoint in a run directory."""


def get_state(session: Session, spent: Costs) -> dict[str, Any]:
    """Return the state of the loop and its costs, for a checkpoint."""
    return {
        "costs": asdict(spent),
        "seconds": session.seconds,
        "before": session.before,
        "owes_evaluation": session.owes_evaluation,
        "loop": session.loop.state(),
    }


def watch(session: Session, done: int, panel: Panel, state: Mapping[str, Any]) -> None:
    """Judge an evaluation, save the checkpoint if it is the best, and log an alarm.

    Every process judges the same values. All must call this.
    """
    monitor, main = session.monitor, session.processes.is_main
    assert monitor is not None
    verdict = monitor.update(done, panel, write=main)
    is_start = done == 0 and not monitor.verdicts
    is_best = verdict is not None and monitor.best is verdict
    if (is_start or is_best) and (main or session.learner.is_sharded):
        root = session.folder / BEST
        checkpoint.save(root, done, session.learner, session.config, state)
        if main:
            checkpoint.prune(root, 1)
    if verdict and verdict.alarm:
        alarm = monitor.describe(verdict)
        session.messages(f"warning: {alarm}")
        if main:
            about = {"step": done, "reason": alarm}
            notify(session.run.notify, "hacking", session.folder, about, session.messages)


def roll_back(session: Session, done: int) -> int:
    """Return to the weights of the best evaluation, or of the start, if the run asks for it.

    Return the number of steps that these weights were trained. Later checkpoints are removed.
    """
    monitor = session.monitor
    assert monitor is not None
    if monitor.cfg.on_hacking != "roll_back":
        return done
    (folder,) = list_by_step(session.folder / BEST)
    state = checkpoint.restore(folder, session.learner)
    session.loop.restore(state["loop"])
    session.processes.barrier()
    if session.processes.is_main:
        for later in list_by_step(session.folder / "checkpoints"):
            if int(later.name.removeprefix(PREFIX)) > state["step"]:
                shutil.rmtree(later)
    session.messages(f"rolled back from step {done} to step {state['step']}: {folder}")
    return state["step"]

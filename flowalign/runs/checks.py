"""Look at a run between steps: reward hacking, distance, updates that change nothing, samples."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from flowalign.reports.run_report import TRAINING_SAMPLES, write_report
from flowalign.rewards.composite import Rewards
from flowalign.runs.session import Session
from flowalign.training import checkpoint
from flowalign.training.checkpoint import PREFIX, list_by_step
from flowalign.training.divergence import distance_to_base
from flowalign.training.held_out_evaluation import Evaluation, EvaluationResult, evaluate, save_grid
from flowalign.training.watch import Panel
from flowalign.types import encode_requests, prompts_of
from flowalign.utils.costs import Costs, stage
from flowalign.utils.media.pixels import to_bytes, to_images
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
        "inputs": session.inputs,
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
    """Return to the weights of the best evaluation or the start, as `evaluation.watch` requires.

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


def measure_distance(
    session: Session, cfg: Evaluation, done: int, result: EvaluationResult
) -> dict[str, float]:
    """Return the distances to the samples before training, on the main process."""
    requests = [request for _, request in cfg.items()]
    found = distance_to_base(session.folder, done, cfg.sampling, result.features, requests)
    if not found:
        session.messages(
            "the distance to the base is not measured: the run began with other settings of "
            "evaluation, or with an earlier version"
        )
    return found


ENOUGH_UPDATES = 20
"""Updates after warm-up before the check."""
LEAST_CHANGE = 1e-4
"""Root mean square of the change, relative to the velocity, below which a run warns."""


class VelocityCheck:
    """Comparison of the velocity of one sample at the start of a run and after 20 updates.

    A learning rate for whole networks hardly moves a LoRA, and nothing else in a run shows it. A
    resumed run, a run of fewer updates and a policy without a text encoder are not checked.
    """

    def __init__(self, session: Session):
        self.session, learner = session, session.learner
        self.due = ENOUGH_UPDATES + learner.cfg.warmup
        self.before: Tensor | None = None
        if session.first_step == 0 and learner.total_updates >= self.due:
            self.before = self._velocity()

    def after_step(self) -> dict[str, float]:
        """Return the change if it is due, and log a warning if it is too small."""
        learner, before = self.session.learner, self.before
        if before is None or learner.num_updates - learner.num_skipped < self.due:
            return {}
        after, self.before = self._velocity(), None
        assert after is not None
        change = float((after - before).norm() / before.norm())
        if change < LEAST_CHANGE:
            self.session.messages(
                f"warning: {self.due} updates changed the velocity by {change:.1e} of its size "
                f"(limit {LEAST_CHANGE:g}).\nRaise optimizer.learning_rate, which is "
                f"{learner.cfg.learning_rate:g}: rates of whole networks hardly move a LoRA. "
                "configs/tasks/lora_rate.yaml, layered last, sets one for a LoRA"
            )
        return {"check/velocity_change": change}

    @stage("check")
    @torch.no_grad()
    def _velocity(self) -> Tensor | None:
        """Return the velocity of a fixed sample, which is no cost of training."""
        policy = self.session.run.policy
        if policy.text_encoder is None:
            return None
        with self.session.costs.paused():
            cond = encode_requests(policy, policy.text_encoder.probe_requests()[:1])
            x = policy.noise(1, torch.Generator().manual_seed(0))
            return policy.velocity(x, policy.schedule(4)[1:2], cond)


def sample_if_due(session: Session, done: int) -> None:
    """Sample with the current weights if that is due; the time is not counted as training time."""
    run, cfg, tracker = session.run, session.run.sampled, session.tracker
    if run.samples is None or cfg is None or done % run.samples.every:
        return
    start, rewards = time.perf_counter(), Rewards([], {}, ranks=session.rewards.ranks)
    with session.costs.paused():
        result = evaluate(run.policy, rewards, cfg, session.processes, run.conditioning)
    if tracker:
        save_grid(session.folder, done, result, TRAINING_SAMPLES)
        write_report(session.folder, running=True, rows=tracker.rows)
        tracker.show(done - 1, TRAINING_SAMPLES, *to_pictures(result))
    session.started += time.perf_counter() - start


def to_pictures(result: EvaluationResult) -> tuple[list[Any], list[str]]:
    """Return the images, or first frames, of a grid, and their prompts."""
    clips = [to_images(to_bytes(clip[:1].cpu())) for clip in result.grid]
    return [clip[0] for clip in clips], prompts_of(result.grid_requests)

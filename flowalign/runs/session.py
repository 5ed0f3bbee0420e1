"""Run a run file: build, train, evaluate, save, resume."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flowalign.data.requests import Requests, read_requests
from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.runs.planning import settle_kept_blocks
from flowalign.runs.run_directory import (
    begin_directory,
    check_resume,
    check_start,
    claim,
    clear,
    compare_settings,
    digest_inputs,
    is_opening,
    is_untrained,
    write_config,
)
from flowalign.training import checkpoint
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import RolloutBatch
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop, build_batch
from flowalign.training.policy_gradient.policy_gradient_settings import (
    PolicyGradientSettings,
    require_policy_gradient,
)
from flowalign.training.recipe import Log, Loop
from flowalign.training.rollouts.collecting import completion_values
from flowalign.training.watch import HackingMonitor
from flowalign.types import Trajectory
from flowalign.utils.console import Messages, say
from flowalign.utils.costs import Costs
from flowalign.utils.folders import Claim
from flowalign.utils.tracking import Tracker, check_trackers


class Callback:
    """Observer of a run; override what you need. Only the main process calls it."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step; steps count from 1."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of an evaluation after `step` steps."""

    def on_samples(self, step: int, images: Sequence[Any], prompts: Sequence[str]) -> None:
        """Receive held-out samples: PIL images, or a list of frames per video, and the prompts."""


@dataclass
class Session:
    """State of a started run."""

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
    """Function that shows messages to the user."""
    messages: Messages
    """Messages of the loop, shown above the progress bar."""
    seconds_before: float = 0.0
    """Training time before `started`, in seconds: that of the resumed run, and of opening the
    loop."""
    started: float = 0.0
    """Start of the first step on the clock of `time.perf_counter`; each pause moves it forward."""
    before: dict[str, float] | None = None
    """Metrics of the evaluation before training; None without evaluation."""
    first_step: int = 0
    """Index of the first step of this process."""
    owes_evaluation: bool = False
    """Whether a stop signal skipped an evaluation that was due."""
    monitor: HackingMonitor | None = None
    """Monitor of watched metrics; None if the run watches none."""
    claim: Claim | None = None
    """Claim of the run directory, held by the main process during training; None on other ranks."""
    tracker: Tracker | None = None
    """Writer of metrics on the main process, once training begins; None on other ranks."""
    callbacks: Sequence[Callback] = ()
    """Observers of steps and evaluations."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that the main process read, see `digest_inputs`."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Content of summary.json, once the run has ended."""

    @property
    def seconds(self) -> float:
        """Return the training time so far, without evaluations."""
        return self.seconds_before + time.perf_counter() - self.started


def start(
    run: Run,
    config: str,
    log: Log,
    resume: Path | None = None,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Session:
    """Claim the run directory, load the weights and open the loop; with `resume`, restore.

    `resume` is a checkpoint, or a run directory without one, which starts over. The directory keeps
    its contents unchanged until the run is accepted.

    Raises:
        ValueError: The directory already holds a run, another process works there, or the
            checkpoint belongs to another run.
    """
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other")
    check_trackers(run.trackers)
    processes = run.join(run.sharding.context_degree)
    # The first process decides: after a restart, machines may see the run directory differently.
    resume = processes.merge({"resume": resume})["resume"]
    if resume:
        check = partial(check_resume, run, config, resume)
    else:
        check = partial(check_start, run, config, overwrite)
    claimed = claim(Path(run.output_dir), processes, log, check)
    with ExitStack() as on_failure:
        if claimed:
            on_failure.callback(claimed.release)
        session = _open_session(run, config, log, processes, overwrite, resume is None)
        session.claim, session.callbacks = claimed, callbacks
        if resume:
            _resume(session, resume)
        if session.monitor:
            session.monitor.resume(session.first_step)
        on_failure.pop_all()
    return session


def _open_session(
    run: Run, config: str, log: Log, processes: Processes, overwrite: bool, begins: bool
) -> Session:
    """Load the weights and open the loop; if the run `begins`, write its settings first."""
    folder, costs, messages = Path(run.output_dir), Costs(), Messages(log)
    # Other ranks have no progress bar, and print long waits directly.
    rewards = run.build_rewards(costs, messages if processes.is_main else say, processes)
    run.load_rewards(rewards)
    settle_kept_blocks(run, processes.world)
    run.load_policy(processes, costs)
    run.encode_prompts(processes)
    ema = (run.ema.decay, run.ema.every) if run.ema else None
    updates = run.num_steps * run.recipe.updates
    learner = Learner(run.policy, run.optimizer, processes, updates, ema)
    unused = begins and is_untrained(folder) and not is_opening(folder, run.recipe)
    if processes.is_main and (overwrite or unused):
        clear(folder)
    processes.barrier()
    before_opening = time.perf_counter()
    with begin_directory(folder, config) if processes.is_main and begins else nullcontext():
        loop = run.recipe.open(run.context(rewards), learner, folder, messages)
    watch = run.evaluation.watch if run.evaluation else None
    return Session(
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
        seconds_before=time.perf_counter() - before_opening,  # includes encoding
        monitor=HackingMonitor(watch, folder) if watch else None,
        inputs=digest_inputs(run, config) if processes.is_main else {},
    )


def _resume(session: Session, resume: Path) -> None:
    """Restore the state, log the settings that change, and write them only then."""
    for change in compare_settings(session.run, session.config, resume):
        session.log(f"changed {change}")
    if resume != session.folder:
        _restore(session, checkpoint.restore(resume, session.learner))
    if session.processes.is_main:
        write_config(session.folder, session.config)
    session.log(f"resumed {resume} after {session.first_step} steps")


def _restore(session: Session, state: dict[str, Any]) -> None:
    session.loop.restore(state["loop"])
    if session.processes.is_main:  # the checkpoint holds the sum over processes
        for name, value in state["costs"].items():
            setattr(session.costs, name, getattr(session.costs, name) + value)
    session.seconds_before += state["seconds"]
    session.before, session.first_step = state["before"], state["step"]
    session.owes_evaluation = state["owes_evaluation"]


@dataclass(frozen=True)
class RunParts:
    """Loaded weights and rewards, shared by runs that differ only in the recipe."""

    learner: Learner
    """Policy with its optimizer."""
    rewards: Rewards
    """Loaded reward models."""
    costs: Costs
    """Counts of this process since the weights were loaded."""

    def build_loop(self, run: Run) -> PolicyGradientLoop:
        """Build the loop of a run with these weights and rewards."""
        recipe = require_policy_gradient(run.recipe)
        requests = Requests(read_requests(recipe.prompts), run.seed, run.conditioning)
        return PolicyGradientLoop(recipe, self.learner, self.rewards, requests, run.seed)


def open_run(run: Run) -> RunParts:
    """Load the weights and rewards of a run.

    Raises:
        ValueError: The recipe has no rollouts to measure.
    """
    require_policy_gradient(run.recipe)
    processes, costs = run.join(), Costs()
    rewards = run.build_rewards(costs)
    run.load_rewards(rewards)
    run.load_policy(processes, costs)
    learner = Learner(run.policy, run.optimizer, processes, run.num_steps, None)
    return RunParts(learner, rewards, costs)


def compute_batch(
    recipe: PolicyGradientSettings,
    learner: Learner,
    loop: PolicyGradientLoop,
    trajectory: Trajectory,
) -> RolloutBatch:
    """Return a trajectory with its values, credit and advantages: the reward stage of a step."""
    rollouts = loop.rollouts
    values = completion_values(
        rollouts.cfg, learner, rollouts.rewards, trajectory, rollouts.earlier
    )
    estimate = rollouts.estimate(values)
    rollouts.learn_critic(values)
    return build_batch(recipe, learner.processes, values, estimate)

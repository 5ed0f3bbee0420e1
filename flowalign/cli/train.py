"""Train as a run file says: `flowalign train`."""

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.check import planned
from flowalign.cli.messages import (
    UsageError,
    add_config,
    add_processes,
    printer,
    settings_of,
    starts_others,
)

if TYPE_CHECKING:
    from flowalign.runs.config import Loaded, Run

HELP = "Train as a run file says."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the number of processes, and what to do with an earlier run."""
    add_config(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="go on from the newest checkpoint, or from this one",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run there")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 for a finished run, 130 or 143 for one that was stopped and can continue."""
    from flowalign.runs.config import load_with_origins

    if args.resume and args.overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    loaded = load_with_origins(*settings_of(args))
    if starts_others(args.processes):
        _start_others(loaded, args)
    return execute(loaded, args.resume, args.overwrite, args.command)


def _start_others(loaded: "Loaded", args: argparse.Namespace) -> None:
    """Check all that needs no weights, and become the launcher of several processes."""
    from flowalign.distributed.launch import relaunch
    from flowalign.distributed.processes import check_fits
    from flowalign.runs.run_directory import check_resume, check_start

    run, config = loaded.run, loaded.annotated()
    try:
        check_fits(args.processes, run.device)
        if args.resume:
            check_resume(run, config, _checkpoint_to_resume(run, args.resume))
        else:
            check_start(run, config, args.overwrite)
    except ValueError as error:
        raise UsageError(str(error)) from error
    planned(run, args.processes)
    relaunch(args.processes, args.words)


def execute(loaded: "Loaded", resume: str | None, overwrite: bool, command: str) -> int:
    """Print the plan, train, and print the outcome; the run directory keeps the command."""
    from flowalign import runs
    from flowalign.training import checkpoint
    from flowalign.utils.console import table
    from flowalign.utils.journal import Journal

    log, run_file = printer(), loaded.run
    folder = Path(run_file.output_dir)
    world = int(os.environ.get("WORLD_SIZE", 1))
    from_checkpoint = _checkpoint_to_resume(run_file, resume) if resume else None
    main = os.environ.get("RANK", "0") == "0"
    rows = planned(run_file, world)
    if main:
        table(f"plan of {folder}", rows)
    with _named_shortage(run_file, world):
        try:
            session = runs.start(run_file, loaded.annotated(), log, from_checkpoint, overwrite)
            with Journal(folder, command) if main else nullcontext():
                summary = runs.train(session)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if main:
        table(f"{summary['status']} after {summary['steps']} steps", _outcome(summary))
        log(f"report: {folder / 'report.html'}")
        if saved := checkpoint.latest(folder / "checkpoints"):
            averaged = f"; averaged, which the table is of: {saved / 'ema'}" if run_file.ema else ""
            log(f"weights: {saved}{averaged}")
    if summary["status"] == "interrupted":
        log(f"interrupted; go on with: flowalign train {folder / 'config.yaml'} --resume")
        return 128 + signal.Signals[summary["stopped_by"]]
    return 0


@contextmanager
def _named_shortage(run_file: "Run", world: int) -> Iterator[None]:
    """Say which part of the memory was too large, and what lowers it, where a GPU has no more."""
    import torch

    from flowalign.runs.fits import shortage
    from flowalign.runs.plan import memory_parts
    from flowalign.training.learner import TrainingFailure

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingFailure(shortage(error, memory_parts(run_file, world))) from error


def _checkpoint_to_resume(run: "Run", resume: str) -> Path:
    """Return a checkpoint that is complete, or the directory of a run that has none yet."""
    from flowalign.runs.run_directory import CONFIG
    from flowalign.training import checkpoint

    folder = Path(run.output_dir)
    path = checkpoint.latest(folder / "checkpoints") if resume == "latest" else Path(resume)
    if path is None and (folder / CONFIG).is_file():
        return folder
    if path is None:
        raise UsageError(f"nothing to resume: {folder} holds no {CONFIG} and no checkpoint")
    try:
        checkpoint.check_complete(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return path


def _outcome(summary: dict) -> dict[str, str]:
    rows = {}
    for name, value in (summary["after"] or {}).items():
        before = summary["before"].get(name)
        if value is not None and before is not None:
            rows[name] = f"{before:.3f} -> {value:.3f} ({value - before:+.3f})"
    for name in ("seconds", "network_evaluations", "reward_calls", "seed"):
        rows[name] = str(summary[name])
    return rows

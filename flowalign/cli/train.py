"""Train as a run file says: `flowalign train`."""

import argparse
import os
from contextlib import nullcontext
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
    """Return 0 for a finished run, 130 for one that was interrupted and can continue."""
    from flowalign.runs.config import load_with_origins

    loaded = load_with_origins(*settings_of(args))
    if starts_others(args.processes):
        _start_others(loaded.run, args)
    return execute(loaded, args.resume, args.overwrite, args.command)


def _start_others(run: "Run", args: argparse.Namespace) -> None:
    """Check all that needs no weights, and become the launcher of several processes."""
    from flowalign.distributed.launch import relaunch
    from flowalign.distributed.processes import check_fits
    from flowalign.runs.session import refuse_begun

    try:
        check_fits(args.processes, run.device)
        if args.resume:
            _checkpoint_to_resume(run, args.resume)
        elif not args.overwrite:
            refuse_begun(Path(run.output_dir), run.recipe)
    except ValueError as error:
        raise UsageError(str(error)) from error
    planned(run, args.processes)
    relaunch(args.processes, args.words)


def execute(loaded: "Loaded", resume: str | None, overwrite: bool, command: str) -> int:
    """Print the plan, train, and print the outcome; the run directory keeps the command."""
    from flowalign.runs import session as runs
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
    try:
        if main and overwrite and not resume:
            runs.remove(folder)
        session = runs.start(run_file, loaded.annotated(), log, from_checkpoint)
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
        return 130
    return 0


def _checkpoint_to_resume(run: "Run", resume: str) -> Path | None:
    from flowalign.runs.session import is_opening
    from flowalign.training import checkpoint

    if resume != "latest":
        path = Path(resume)
    else:
        folder = Path(run.output_dir)
        newest = checkpoint.latest(folder / "checkpoints")
        if newest is None and is_opening(folder, run.recipe):
            return None
        if newest is None:
            raise UsageError(f"nothing to resume: {folder / 'checkpoints'} holds no checkpoint")
        path = newest
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

"""Train from a run file: `flowalign train`."""

import argparse
import os
import shlex
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.options import (
    Parser,
    add_config,
    add_executor,
    add_processes,
    address,
    read_settings,
    whole,
)
from flowalign.distributed.launch import RUN_ID, Launch, is_restarted, relaunch, starts_others
from flowalign.utils.console import get_log, is_main, table
from flowalign.utils.run_events import notify, notify_failure, record_command

if TYPE_CHECKING:
    from flowalign.runs.config import LoadedRun

HELP = "Train from a run file."
_PROCESS_OPTIONS = {
    "processes": 1,
    "restarts": 0,
    "nodes": 1,
    "rendezvous": None,
    "executor": "local",
    "address": None,
}
"""Options of the processes of a run, with their defaults."""


def add_arguments(parser: Parser) -> None:
    """Add the run files, the number of processes, and the treatment of an earlier run."""
    add_config(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="continue from the newest checkpoint, or from this one",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run")
    add_processes(parser)
    parser.add_argument(
        "--restarts",
        type=whole(0),
        default=0,
        help="restarts from the newest checkpoint after a process failed (default: 0)",
    )
    parser.add_argument(
        "--nodes",
        type=whole(1),
        default=1,
        help="machines that run this command with as many processes each (default: 1)",
    )
    parser.add_argument(
        "--rendezvous",
        type=address,
        metavar="HOST:PORT",
        help="address on one of the machines where all of them meet",
    )
    add_executor(parser)
    parser.rules += (
        "--resume excludes --overwrite",
        "--restarts excludes --overwrite: it continues from the newest checkpoint",
        "--nodes needs --rendezvous HOST:PORT",
        "--rendezvous needs --nodes N",
        "--nodes excludes --executor ray: Ray knows its machines",
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 for a finished run, and 130 or 143 for a stopped run that can continue."""
    from flowalign.cli import main as command_line
    from flowalign.distributed.ray_train import RayLaunch, run_on_ray
    from flowalign.runs.config import load_with_origins
    from flowalign.runs.run_directory import CONFIG

    if args.restarts and args.resume not in (None, "latest"):
        raise ValueError(
            "--restarts continues from the newest checkpoint of the run directory, so it excludes "
            "--resume CHECKPOINT;\nleave the checkpoint out, or choose another output_dir"
        )
    loaded = load_with_origins(*read_settings(args))
    if args.executor == "ray" and "RANK" not in os.environ:
        _check_start(loaded, args)
        launch = RayLaunch(args.processes, args.restarts, args.address, loaded.run.device)
        return run_on_ray(launch, command_line.main, args.words)
    if starts_others(args.processes, launched=args.restarts > 0 or args.nodes > 1):
        _check_start(loaded, args)
        launch = Launch(args.processes, args.restarts, args.nodes, args.rendezvous)
        relaunch(launch, args.words)
    if is_restarted() and (Path(loaded.run.output_dir) / CONFIG).is_file():
        args.resume = "latest"
    return execute(loaded, args)


def _check_start(loaded: "LoadedRun", args: argparse.Namespace) -> None:
    """Check everything that needs no weights, before several processes start."""
    from flowalign.distributed.processes import check_fits
    from flowalign.runs.planning import plan
    from flowalign.runs.run_directory import check_resume, check_start, find_checkpoint

    run_file, config = loaded.run, loaded.annotate()
    if not args.address:
        check_fits(args.processes, run_file.device)
    if resume := args.resume and find_checkpoint(run_file, args.resume):
        check_resume(run_file, config, resume)
    else:
        check_start(run_file, config, args.overwrite)
    plan(run_file, args.processes * args.nodes)


def execute(loaded: "LoadedRun", args: argparse.Namespace) -> int:
    """Print the plan, train, and print the outcome; store the command in the run directory."""
    from flowalign.runs.run_directory import find_checkpoint, find_latest
    from flowalign.runs.session import start
    from flowalign.runs.train_session import planned, train

    log, run_file, main = get_log(), loaded.run, is_main()
    folder = Path(run_file.output_dir)
    # Before the plan, which builds modules; one process reads all files of the checkpoint.
    resume = find_checkpoint(run_file, args.resume, whole=main) if args.resume else None
    notice = notify_failure(run_file.notify, folder, log) if main else nullcontext()
    with planned(run_file), notice:
        session = start(run_file, loaded.annotate(), log, resume, args.overwrite)
        with record_command(folder, args.command) if main else nullcontext():
            summary = train(session)
    if main:
        table(f"{summary['status']} after {summary['steps']} steps", _format_outcome(summary))
        about = {name: summary[name] for name in ("steps", "seconds", "before", "after")}
        notify(run_file.notify, summary["status"], folder, about, log)
        log(f"report: {folder / 'report.html'}")
        if saved := find_latest(folder):
            averaged = f"; averaged weights (evaluated): {saved / 'ema'}" if run_file.ema else ""
            log(f"weights: {saved}{averaged}")
    if summary["status"] == "interrupted":
        log(f"interrupted; continue with: {_continuation(folder, args)}")
        return 128 + signal.Signals[summary["stopped_by"]]
    return 0


def _continuation(folder: Path, args: argparse.Namespace) -> str:
    """Return the command that continues a run with the same processes."""
    words = ["flowalign", "train", str(folder / "config.yaml"), "--resume"]
    for name, usual in _PROCESS_OPTIONS.items():
        if (value := getattr(args, name)) != usual:
            words += [f"--{name}", str(value)]
    known = os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID or args.executor == "ray"
    by_others = "RANK" in os.environ and not known
    return shlex.join(words) + (", started by the same launcher" if by_others else "")


def _format_outcome(summary: dict) -> dict[str, str]:
    rows = {}
    for name, value in (summary["after"] or {}).items():
        before = summary["before"].get(name)
        if value is not None and before is not None:
            rows[name] = f"{before:.3f} -> {value:.3f} ({value - before:+.3f})"
    for name in ("seconds", "network_evaluations", "reward_calls", "seed"):
        rows[name] = str(summary[name])
    return rows

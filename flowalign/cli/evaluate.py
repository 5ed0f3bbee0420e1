"""Evaluate a run file's model, or a checkpoint of it: `flowalign eval`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.messages import (
    UsageError,
    add_config,
    add_processes,
    settings_of,
    starts_others,
)

if TYPE_CHECKING:
    from flowalign.distributed.processes import Processes
    from flowalign.rewards.composite import Rewards
    from flowalign.runs.config import Run

HELP = "Evaluate a run file's model, or a checkpoint of it, on its evaluation prompts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the weights and the number of processes."""
    add_config(parser)
    parser.add_argument("--weights", metavar="CHECKPOINT", help="folder with trained weights")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    """Print the metrics as a table and as a line of JSON, and return 0."""
    from flowalign.runs.config import load
    from flowalign.training.evaluate import evaluate
    from flowalign.utils.console import table
    from flowalign.utils.errors import ConfigError

    run_file, _ = load(*settings_of(args))
    if run_file.evaluation is None:
        raise ConfigError(
            f"{' '.join(args.config)}: evaluation is null, so there is nothing to evaluate"
        )
    if args.weights:
        _check_weights(Path(args.weights))
    if starts_others(args.processes):
        _start_others(run_file, len(run_file.evaluation.items()), args)
    rewards = run_file.build_rewards()
    processes = _load(run_file, args.weights, rewards)
    given = run_file.evaluation, processes, run_file.dressing
    metrics = evaluate(run_file.policy, rewards, *given).metrics
    if processes.is_main:
        table(f"{args.weights or 'before training'}", {k: f"{v:.4f}" for k, v in metrics.items()})
        print(json.dumps(metrics))  # noqa: T201
    return 0


def _start_others(run_file: "Run", prompts: int, args: argparse.Namespace) -> None:
    from flowalign.distributed.launch import relaunch
    from flowalign.distributed.processes import check_fits
    from flowalign.runs.policy_setup import check_world

    try:
        check_fits(args.processes, run_file.device)
        check_world(run_file.sharding, args.processes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if prompts < run_file.sharding.groups(args.processes):
        raise UsageError(
            f"--processes is {args.processes}, but evaluation has {prompts} samples; "
            f"give at most {prompts * run_file.sharding.context_degree}"
        )
    relaunch(args.processes, args.words)


def _check_weights(folder: Path) -> None:
    """Refuse what is no checkpoint by its form, before the model is read."""
    from flowalign.training import checkpoint

    if not folder.is_dir():
        raise UsageError(f"--weights {str(folder)!r} is not a folder (looked in {Path.cwd()})")
    if newest := checkpoint.latest(folder / "checkpoints"):
        raise UsageError(f"--weights {folder} is a run directory; its newest weights: {newest}")
    if not any(path.is_file() for path in folder.rglob("*")):
        raise UsageError(f"--weights {folder} is a folder without files")


def _load(run_file: "Run", weights: str | None, rewards: "Rewards") -> "Processes":
    import torch

    from flowalign.distributed.processes import join

    if run_file.threads:
        torch.set_num_threads(run_file.threads)
    try:
        processes = join(run_file.device, run_file.sharding.context_degree)
        rewards.processes = processes
        run_file.load_rewards(rewards)
        run_file.load_policy(processes)
        if weights:
            run_file.policy.load_weights(weights)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return processes

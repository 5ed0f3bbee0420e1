"""Evaluate a run file's model, or a checkpoint of it, on its evaluation prompts."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from flowalign.cli.commands.benchmark import ONLY_HERE, run_benchmark
from flowalign.cli.commands.common import read_settings, starts_others
from flowalign.distributed.launch import Launch, relaunch
from flowalign.distributed.processes import Processes, check_fits, join
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run, load
from flowalign.runs.policy_setup import check_world
from flowalign.training import checkpoint
from flowalign.training.held_out_evaluation import evaluate
from flowalign.utils.console import table
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.files import to_json


def run(args: argparse.Namespace) -> int:
    """Evaluate on a benchmark, or print the metrics as a table and as JSON; return 0."""
    if args.benchmark:
        return run_benchmark(args)
    _check_options(args)
    weights = args.weights[0] if args.weights else None
    run_file, _ = load(*read_settings(args))
    if run_file.evaluation is None:
        raise ConfigError(
            f"{' '.join(args.config)}: evaluation is null, so there is nothing to evaluate"
        )
    cfg = replace(run_file.evaluation, watch=None)  # only training compares evaluations
    if weights:
        _check_weights(Path(weights))
    if starts_others(args.processes):
        _check_processes(run_file, len(cfg.items()), args.processes)
        relaunch(Launch(args.processes), args.words)
    rewards = run_file.build_rewards()
    with convert_value_errors():
        processes = _load_models(run_file, weights, rewards)
    result = evaluate(run_file.policy, rewards, cfg, processes, run_file.conditioning)
    if processes.is_main:
        rows = {name: f"{value:.4f}" for name, value in result.metrics.items()}
        table(f"{weights or 'before training'}", rows)
        print(to_json(result.metrics))  # noqa: T201
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that only benchmarks have."""
    given = [f"--{name}" for name in ONLY_HERE if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"{', '.join(given)} needs --benchmark NAME")
    if len(args.weights or ()) > 1:
        raise ConfigError("several --weights need --benchmark NAME")


@convert_value_errors()
def _check_processes(run_file: Run, prompts: int, processes: int) -> None:
    """Raise ConfigError if there are too few cores, GPUs or prompts for the processes."""
    check_fits(processes, run_file.device)
    check_world(run_file.sharding, processes)
    if prompts < run_file.sharding.groups(processes):
        raise ConfigError(
            f"--processes is {processes}, but evaluation has {prompts} samples; "
            f"give at most {prompts * run_file.sharding.context_degree}"
        )


def _check_weights(folder: Path) -> None:
    """Raise ConfigError if a folder is no checkpoint, before the model is loaded."""
    if not folder.is_dir():
        raise ConfigError(f"--weights {str(folder)!r} is not a folder (looked in {Path.cwd()})")
    if newest := checkpoint.latest(folder / "checkpoints"):
        raise ConfigError(f"--weights {folder} is a run directory; its newest weights: {newest}")
    if not any(path.is_file() for path in folder.rglob("*")):
        raise ConfigError(f"--weights {folder} is a folder without files")
    with convert_value_errors("--weights: "):
        checkpoint.check_weights(folder)


def _load_models(run_file: Run, weights: str | None, rewards: Rewards) -> Processes:
    """Load the policy and the rewards; return the processes that evaluate together."""
    if run_file.threads:
        torch.set_num_threads(run_file.threads)
    processes = join(run_file.device, run_file.sharding.context_degree)
    rewards.ranks = processes
    run_file.load_rewards(rewards)
    run_file.load_policy(processes)
    if weights:
        run_file.policy.load_weights(weights)
    return processes

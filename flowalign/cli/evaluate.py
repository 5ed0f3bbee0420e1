"""Evaluate a run file's model, or a checkpoint of it: `flowalign eval`."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.options import SEED, add_config, add_processes, read_settings, shard, whole
from flowalign.distributed.launch import Launch, relaunch, starts_others
from flowalign.utils.console import table
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.files import to_json

if TYPE_CHECKING:
    from torch import Tensor

    from flowalign.distributed.processes import Processes
    from flowalign.rewards.composite import Rewards
    from flowalign.runs.config import Run
    from flowalign.studies.benchmark.benchmark_job import BenchmarkRun

HELP = "Evaluate a run file's model, or a checkpoint of it, on its prompts or on a benchmark."
_BENCHMARK = ("data", "out", "shard", "rewards", "scores", "num_steps", "count", "limit", "seed")
"""Options that need `--benchmark`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the weights, the number of processes and the options of benchmarks."""
    add_config(parser)
    parser.add_argument(
        "--weights",
        metavar="CHECKPOINT",
        action="append",
        help="folder with trained weights; for a benchmark it may be repeated, and the model "
        "without them is evaluated as well",
    )
    parser.add_argument(
        "--distance",
        action="store_true",
        help="also sample without the weights, and measure the distance between both samples",
    )
    add_processes(parser)
    add = parser.add_argument_group("benchmarks").add_argument
    add("--benchmark", metavar="NAME", help="protocol card: a name in configs/benchmarks, or YAML")
    add("--data", metavar="FILE", help="official prompt file of the benchmark")
    add(
        "--out",
        help="folder of results and images; an unfinished one is continued "
        "(default: runs/benchmarks/NAME)",
    )
    add("--shard", type=shard, metavar="i/n", help="part of the images, counted from 0")
    add("--rewards", metavar="FILE", help="scorers that replace those of the card")
    add(
        "--scores",
        nargs="+",
        metavar="FILE",
        help="output of an official tool, for cards without scorers: a JSONL file, or for VBench "
        "a results file (or folder) per model",
    )
    add("--num_steps", type=whole(1), help="denoising steps (default: the card's)")
    add("--count", type=whole(1), help="images per row (default: the card's)")
    add("--limit", type=whole(1), help="number of rows, from the first one (default: all)")
    add("--seed", type=whole(*SEED), help="seed of the initial noises (default: the card's)")


def run(args: argparse.Namespace) -> int:
    """Evaluate on a benchmark, or print the metrics as a table and as JSON; return 0."""
    from flowalign.runs.config import load
    from flowalign.training.divergence import list_encoders, measure_distance
    from flowalign.training.held_out_evaluation import evaluate

    if args.benchmark:
        return _run_benchmark(args)
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
    with convert_value_errors():
        rewards, processes = _load_models(run_file)
    sampled = cfg, processes, run_file.conditioning
    base: Mapping[str, Tensor] = {}
    if args.distance:
        encoders = replace(rewards, models=list_encoders(rewards.models), weight_of={})
        base = evaluate(run_file.policy, encoders, *sampled).features
    if weights:
        with convert_value_errors():
            run_file.policy.load_weights(weights)
    result = evaluate(run_file.policy, rewards, *sampled)
    requests = [request for _, request in cfg.items()]
    metrics = result.metrics | measure_distance(base, result.features, requests)
    if processes.is_main:
        rows = {name: f"{value:.4f}" for name, value in metrics.items()}
        table(f"{weights or 'before training'}", rows)
        print(to_json(metrics))  # noqa: T201
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that only benchmarks have."""
    given = [f"--{name}" for name in _BENCHMARK if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"{', '.join(given)} needs --benchmark NAME")
    if args.distance and not args.weights:
        raise ConfigError("--distance needs --weights CHECKPOINT, the weights to compare")
    if len(args.weights or ()) > 1:
        raise ConfigError("several --weights need --benchmark NAME")


@convert_value_errors()
def _check_processes(run_file: "Run", prompts: int, processes: int) -> None:
    """Raise ConfigError if there are too few cores, GPUs or prompts for the processes."""
    from flowalign.distributed.processes import check_fits
    from flowalign.runs.policy_setup import check_world

    check_fits(processes, run_file.device)
    check_world(run_file.sharding, processes)
    if prompts < run_file.sharding.groups(processes):
        raise ConfigError(
            f"--processes is {processes}, but evaluation has {prompts} samples; "
            f"give at most {prompts * run_file.sharding.context_degree}"
        )


def _check_weights(folder: Path) -> None:
    """Raise ConfigError if a folder is no checkpoint, before the model is loaded."""
    from flowalign.training import checkpoint
    from flowalign.training.checkpoint_files import require_weights

    with convert_value_errors():
        require_weights(folder)
    if newest := checkpoint.latest(folder / "checkpoints"):
        raise ConfigError(f"--weights {folder} is a run directory; its newest weights: {newest}")
    if not any(path.is_file() for path in folder.rglob("*")):
        raise ConfigError(f"--weights {folder} is a folder without files")
    with convert_value_errors("--weights: "):
        checkpoint.check_weights(folder)


def _load_models(run_file: "Run") -> "tuple[Rewards, Processes]":
    """Load the policy and the rewards; return these, and the processes that evaluate together."""
    import torch

    from flowalign.distributed.processes import join

    if run_file.threads:
        torch.set_num_threads(run_file.threads)
    processes = join(run_file.device, run_file.sharding.context_degree)
    rewards = run_file.build_rewards(ranks=processes)
    run_file.load_rewards(rewards)
    run_file.load_policy(processes)
    return rewards, processes


@convert_value_errors()
def _run_benchmark(args: argparse.Namespace) -> int:
    """Make and score the images of this shard; without a shard, also write the results."""
    from rich.console import Console
    from rich.markdown import Markdown

    from flowalign.studies.benchmark.benchmark_job import write_report
    from flowalign.utils.console import say

    if args.processes > 1:
        return _run_shards(args)
    run = _open_benchmark(args)
    made, out = run.job.run(), run.job.sampler.out
    if args.shard:
        i, n = args.shard
        say(
            f"shard {i}/{n}: {made} new images in {out}; after all shards, repeat the command "
            "without --shard"
        )
        return 0
    if run.job.rewards is None and run.scores is None:
        say(
            f"{made} new images in {_name_folders(run)}. Score them with: {run.card.scorer}\n"
            "Then repeat the command with --scores FILE"
        )
        return 0
    Console().print(Markdown(write_report(run)))
    say(f"results.json, results.md, results.tex and results.html: {out}")
    return 0


def _open_benchmark(args: argparse.Namespace) -> "BenchmarkRun":
    from flowalign.studies.benchmark.open_benchmark import BenchmarkOptions, open_benchmark

    given = {name: getattr(args, name) for name in ("benchmark", "weights", *_BENCHMARK)}
    return open_benchmark(BenchmarkOptions(**given), *read_settings(args))


def _name_folders(run: "BenchmarkRun") -> str:
    """Return the folders that the official tool reads, with the names that it expects."""
    from flowalign.studies.benchmark.external import link_clips

    job = run.job
    if run.card.output != "vbench":
        return f"{job.sampler.out}/<model>/media"
    places = [place for block in job.blocks for place in block]
    folders = [link_clips(job.folder(m), places, job.sampler.requests) for m in job.models]
    return ", ".join(str(folder) for folder in folders)


def _run_shards(args: argparse.Namespace) -> int:
    """Run this command once per shard, in parallel, and then once to merge."""
    from flowalign.distributed.processes import check_fits
    from flowalign.training.learner import TrainingFailure
    from flowalign.utils.console import say
    from flowalign.utils.subprocesses import run_all, shard_jobs

    if args.shard:
        raise ValueError("--shard and --processes exclude each other: give one of them")
    run, count = _open_benchmark(args), args.processes
    check_fits(count, run.job.sampler.run.device)
    jobs = shard_jobs(args.words, count, run.job.sampler.out / "logs")
    if failed := run_all(jobs, count, say):
        raise TrainingFailure(f"{len(failed)} of {count} shards failed, see {failed[0].log}")
    args.processes = 1
    return _run_benchmark(args)

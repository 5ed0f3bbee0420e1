"""Evaluate a run file's model, or a checkpoint of it: `flowalign eval`."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.options import (
    SEED,
    Parser,
    add_config,
    add_processes,
    read_settings,
    shard,
    whole,
)
from flowalign.distributed.launch import Launch, relaunch, starts_others
from flowalign.utils.console import table
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.files import to_json

if TYPE_CHECKING:
    from flowalign.studies.benchmark.benchmark_job import BenchmarkJob

HELP = "Evaluate a run file's model, or a checkpoint of it, on its prompts or on a benchmark."
_BENCHMARK = ("data", "out", "shard", "rewards", "scores", "num_steps", "count", "limit", "seed")
"""Options that need `--benchmark`."""


def add_arguments(parser: Parser) -> None:
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
    parser.rules += (
        *(f"--{name} needs --benchmark NAME" for name in _BENCHMARK),
        "--distance needs --weights CHECKPOINT",
        "--shard excludes --processes",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate on a benchmark, or print the metrics as a table and as JSON; return 0."""
    from flowalign.runs.config import load
    from flowalign.runs.evaluate_weights import check_processes, check_weights, evaluate_weights

    if args.benchmark:
        return _run_benchmark(args)
    if len(args.weights or ()) > 1:
        raise ValueError("several --weights need --benchmark NAME")
    weights = args.weights[0] if args.weights else None
    run_file, _ = load(*read_settings(args))
    if run_file.evaluation is None:
        raise ValueError(
            f"{' '.join(args.config)}: evaluation is null, so there is nothing to evaluate"
        )
    cfg = replace(run_file.evaluation, watch=None)  # only training compares evaluations
    if weights:
        check_weights(Path(weights))
    if starts_others(args.processes):
        check_processes(run_file, len(cfg.items()), args.processes)
        relaunch(Launch(args.processes), args.words)
    metrics = evaluate_weights(run_file, cfg, weights, args.distance)
    if metrics is not None:
        rows = {name: f"{value:.4f}" for name, value in metrics.items()}
        table(f"{weights or 'before training'}", rows)
        print(to_json(metrics))  # noqa: T201
    return 0


def _run_benchmark(args: argparse.Namespace) -> int:
    """Make and score the images of this shard; without a shard, also write the results."""
    from rich.console import Console
    from rich.markdown import Markdown

    from flowalign.studies.benchmark.results import write_report
    from flowalign.utils.console import say

    if args.processes > 1:
        return _run_shards(args)
    job = _open_benchmark(args)
    made, out = job.run(), job.sampler.out
    if args.shard:
        i, n = args.shard
        say(
            f"shard {i}/{n}: {made} new images in {out}; after all shards, repeat the command "
            "without --shard"
        )
        return 0
    if job.rewards is None and job.scores is None:
        say(
            f"{made} new images in {_name_folders(job)}. Score them with: {job.card.scorer}\n"
            "Then repeat the command with --scores FILE"
        )
        return 0
    Console().print(Markdown(write_report(job)))
    say(f"results.json, results.md, results.tex and results.html: {out}")
    return 0


def _open_benchmark(args: argparse.Namespace) -> "BenchmarkJob":
    from flowalign.studies.benchmark.open_benchmark import BenchmarkOptions, open_benchmark

    given = {name: getattr(args, name) for name in ("benchmark", "weights", *_BENCHMARK)}
    return open_benchmark(BenchmarkOptions(**given), *read_settings(args))


def _name_folders(job: "BenchmarkJob") -> str:
    """Return the folders that the official tool reads, with the names that it expects."""
    from flowalign.studies.benchmark.external import link_clips

    if job.card.output != "vbench":
        return f"{job.sampler.out}/<model>/media"
    places = [place for block in job.blocks for place in block]
    folders = [link_clips(job.folder(m), places, job.sampler.requests) for m in job.models]
    return ", ".join(str(folder) for folder in folders)


def _run_shards(args: argparse.Namespace) -> int:
    """Run this command once per shard, in parallel, and then once to merge."""
    from flowalign.distributed.processes import check_fits
    from flowalign.utils.console import say
    from flowalign.utils.subprocesses import run_all, shard_jobs

    sampler, count = _open_benchmark(args).sampler, args.processes
    check_fits(count, sampler.run.device)
    jobs = shard_jobs(args.words, count, sampler.out / "logs")
    if failed := run_all(jobs, count, say):
        raise TrainingFailure(f"{len(failed)} of {count} shards failed, see {failed[0].log}")
    args.processes = 1
    return _run_benchmark(args)

"""Score a preference dataset, or a folder of images or videos: `flowalign score`."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.cli.options import add_columns, add_executor, shard, whole
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.files import digest_file
from flowalign.utils.folders import check_folder_path, compare_settings

if TYPE_CHECKING:
    from flowalign.curation.scoring.part_files import RunningStats
    from flowalign.curation.scoring.scoring_job import ScoringJob

HELP = "Score a dataset, or a folder of images or videos."
_THREADS = min(8, os.cpu_count() or 1)
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign score`."""
    add = parser.add_argument
    add(
        "data",
        help="folder of images, videos, parquet or tar files, or a folder saved by `datasets`; or "
        "a .jsonl, .json, .csv, .parquet or .tar file, or a quoted pattern such as "
        "'shards/{000..012}.tar'",
    )
    files = "YAML files with a list `rewards:`, and classes such as reward_models.JpegSize"
    add("--rewards", required=True, nargs="+", metavar="FILE", help=files)
    add("--out", required=True, metavar="FOLDER", help="output folder; an earlier job is resumed")
    add("--schema", default="auto", help="schema of the data (default: detected from the columns)")
    add("--root", metavar="FOLDER", help="base of relative paths (default: folder of the data)")
    add_columns(parser)
    add("--format", choices=("parquet", "jsonl"), default="parquet", help="(default: parquet)")
    add("--batch_size", type=whole(1), default=32, help="images or videos per batch (default: 32)")
    add("--workers", type=whole(1, 256), default=_THREADS, help="decoder threads")
    add("--limit", type=whole(1), help="number of records, from the first one (default: all)")
    add("--max_frames", type=whole(1), help="evenly spaced frames of a video (default: all)")
    add(
        "--max_failed_fraction",
        type=float,
        default=0.05,
        help="share of failed rows above which the job stops (default: 0.05)",
    )
    add(
        "--summarize",
        metavar="PREFIX",
        help="also write prompts.jsonl: each prompt with its mean scores, in columns that begin "
        "with PREFIX",
    )
    _add_process_options(parser)


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that divide a job between processes."""
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--processes",
        type=whole(1),
        default=1,
        help="processes on this machine, at most one per core; each has or shares a GPU",
    )
    several.add_argument(
        "--shard",
        metavar="i/n",
        type=shard,
        help="run as the i-th of n processes, from 0; run once more without it to merge",
    )
    add_executor(parser)


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Score; return 0, or 1 if too many rows failed, possibly with a complete table."""
    from flowalign.curation.scoring.part_files import TooManyFailures

    _check(args)
    job, settings = _open_job(args)
    try:
        several = args.executor != "ray" and args.processes > 1
        blocks, speed = _run_shards(args, job) if several else _score(args, job, settings)
        if not args.shard:
            _finish(args, job, blocks, speed).check(job.max_failed_fraction)
    except TooManyFailures as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that exclude each other, or that this machine cannot serve."""
    from flowalign.curation.scoring.part_files import needs_pyarrow
    from flowalign.distributed.processes import check_fits

    check_folder_path(Path(args.out))
    if args.summarize is not None and args.shard:
        raise ValueError("--summarize needs all shards: set it in the run without --shard")
    if args.format == "parquet":
        needs_pyarrow()
    if args.executor != "ray" and args.address:
        raise ValueError(f"--address {args.address} needs --executor ray")
    if args.executor == "ray" and args.shard:
        raise ValueError("--shard and --executor ray exclude each other; Ray divides the blocks")
    if args.executor == "ray":
        from flowalign.utils.ray_cluster import prepare_ray

        prepare_ray("ray.data", args.address)
    if args.processes > 1 and not args.address:
        check_fits(args.processes, "cpu")  # they may share a GPU, but no core


def load_job(args: argparse.Namespace) -> "ScoringJob":
    """Return the job with loaded models, for a worker of a cluster."""
    job, settings = _open_job(args)
    job.load(settings)
    return job


def _open_job(args: argparse.Namespace) -> "tuple[ScoringJob, dict[str, Any]]":
    """Return the job, before its weights are read, and the settings that decide its scores."""
    from flowalign.curation.scoring.scoring_job import ScoringJob
    from flowalign.curation.scoring.table_rows import check_prompts
    from flowalign.data.readers import open_dataset, parse_columns
    from flowalign.rewards.config import load_rewards
    from flowalign.utils.local_modules import list_files

    columns = parse_columns(args.columns)
    dataset = open_dataset(args.data, args.schema, args.root, columns)
    models, text = load_rewards(*args.rewards)
    check_prompts(dataset, models)
    job = ScoringJob(
        dataset,
        models,
        Path(args.out),
        batch_size=args.batch_size,
        workers=args.workers,
        limit=args.limit,
        max_frames=args.max_frames,
        max_failed_fraction=args.max_failed_fraction,
        shard=args.shard or (0, 1),
    )
    code = {str(file): digest_file(file) for file in list_files(text)}
    places = {"data": args.data, "root": dataset.root}
    return job, {
        **{name: str(Path(place).resolve()) for name, place in places.items()},
        "rewards": text,
        **({"code": code} if code else {}),
        **job.settings(),
    }


def _score(
    args: argparse.Namespace, job: "ScoringJob", settings: Mapping[str, Any]
) -> tuple[Sequence[int], Mapping[str, float]]:
    """Score the missing blocks; return the blocks of the whole dataset, and the speed.

    Raises:
        TooManyFailures: Too many rows or processes failed.
    """
    from rich.console import Console

    from flowalign.curation.scoring import scoring_job as scoring
    from flowalign.curation.scoring.part_files import Throughput, TooManyFailures
    from flowalign.curation.scoring.progress import show_progress
    from flowalign.utils.folders import hold_lock

    speed, (i, n) = Throughput(), job.shard
    name = ".lock-ray" if args.executor == "ray" else f".lock-{i}-of-{n}"
    with hold_lock(job.folder / "parts" / name):
        if args.executor == "ray":
            from flowalign.curation.scoring.ray_data import ScoringCluster

            compare_settings(job.folder / scoring.MANIFEST, settings, scoring.MAKER)
            cluster = ScoringCluster(args.processes, args.address)
            score = partial(cluster.run, job, partial(load_job, args))
        else:
            schema = f"{args.data}: schema {job.dataset.schema.name}"
            Console().print(schema, markup=False, highlight=False)
            job.load(settings)
            score = partial(scoring.run, job)
        try:
            with show_progress(job) as watch:
                return score(watch=watch, speed=speed), speed.summary()
        except TooManyFailures as error:
            if not args.shard:
                about = {"status": "stopped", **speed.summary()}
                scoring.write_summary(job.folder, error.stats, about)
            raise


def _run_shards(
    args: argparse.Namespace, job: "ScoringJob"
) -> tuple[Sequence[int], Mapping[str, float]]:
    """Run this command once per shard, in parallel; return the blocks and the seconds."""
    from rich.console import Console

    from flowalign.curation.scoring.part_files import RunningStats, TooManyFailures
    from flowalign.utils.subprocesses import run_all, shard_jobs

    start, log = time.perf_counter(), Console().print
    jobs = shard_jobs(args.words, args.processes, job.folder / "logs", ["--summarize"])
    jobs = [replace(one, command=[*_device(i), *one.command]) for i, one in enumerate(jobs)]
    failed = run_all(jobs, len(jobs), lambda text: log(text, markup=False, highlight=False))
    if failed:
        why = f"{failed[0].last_line()}\n{len(failed)} of {len(jobs)} shards failed"
        raise TooManyFailures(why, RunningStats())
    seconds = {"seconds": time.perf_counter() - start, "processes": args.processes}
    return job.parts.blocks(), seconds


def _device(i: int) -> list[str]:
    """Return a command prefix that gives each process its own accelerator, if there are several."""
    import torch

    from flowalign.utils.subprocesses import select_device

    count = torch.cuda.device_count()
    own = select_device(f"cuda:{i % count}") if count > 1 else {}
    return ["env", *(f"{name}={value}" for name, value in own.items())] if own else []


def _finish(
    args: argparse.Namespace, job: "ScoringJob", blocks: Sequence[int], speed: Mapping[str, float]
) -> "RunningStats":
    """Write the table, the summary and the pages."""
    from flowalign.curation.scoring import scores_page
    from flowalign.curation.scoring import scoring_job as scoring

    folder, parts = job.folder, job.parts
    stats = scoring.finish(folder, blocks, args.format, speed)
    page = scores_page.write(folder, parts.rows(blocks), job.dataset)
    rows = {
        dim: f"{known['mean']:.4g} +- {known['std']:.2g}, {known['valid']} valid"
        if known["valid"]
        else "none valid"
        for dim, known in stats.summary()["dimensions"].items()
    }
    most = stats.reasons.most_common(5)
    rows |= {why: f"{count} row{'s' * (count > 1)}" for why, count in most} | {"page": str(page)}
    if args.summarize is not None:
        prompts = scores_page.write_prompts(folder, parts.rows(blocks), args.summarize)
        rows["prompts"] = str(prompts)
    rows |= {f"warning: {one.spec.name}": one.caveat for one in job.models if one.caveat}
    table(f"{stats.rows} rows, {stats.failed} failed: {folder / f'scores.{args.format}'}", rows)
    return stats

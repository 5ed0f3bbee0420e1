"""Score a preference dataset, or a folder of images or videos: `flowalign score`."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.options import Parser, add_columns, add_executor, shard, whole
from flowalign.utils.console import say, table
from flowalign.utils.files import digest_file
from flowalign.utils.folders import check_folder_path, hold_lock
from flowalign.utils.imports import import_optional

if TYPE_CHECKING:
    from flowalign.curation.scoring.scoring_job import ScoringJob
    from flowalign.curation.scoring.stats import RunningStats

HELP = "Score a dataset, or a folder of images or videos."
_THREADS = min(8, os.cpu_count() or 1)
EXIT_FAILED = 1


def add_arguments(parser: Parser) -> None:
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


def _add_process_options(parser: Parser) -> None:
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
    parser.rules += (
        "--summarize excludes --shard: it needs all shards",
        "--shard excludes --executor ray: Ray divides the blocks",
    )


def run(args: argparse.Namespace) -> int:
    """Score; return 0, or 1 if too many rows failed, possibly with a complete table."""
    from flowalign.curation.scoring import scoring_job as scoring
    from flowalign.curation.scoring.progress import show_progress
    from flowalign.curation.scoring.stats import TooManyFailures

    _check(args)
    job = open_job(args)
    say(f"{args.data}: schema {job.dataset.schema.name}")
    score, lock = scoring.run, ".lock-{}-of-{}".format(*job.shard)
    if args.executor == "ray":
        from flowalign.curation.scoring.ray_data import ScoringCluster

        cluster = ScoringCluster(args.processes, args.address, partial(open_job, args))
        score, lock = cluster.run, ".lock-ray"
    try:
        if args.executor == "local" and args.processes > 1:
            blocks, speed = _run_shards(job, args.words, args.processes)
        else:
            with hold_lock(job.folder / "parts" / lock), show_progress(job.share()) as progress:
                blocks, speed = score(job, progress), progress.speed()
        if not args.shard:
            stats = scoring.finish(job, blocks, args.format, speed, args.summarize)
            _print_summary(args, stats, job)
            stats.check(job.max_failed_fraction)
    except TooManyFailures as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that this machine cannot serve."""
    check_folder_path(Path(args.out))
    if args.format == "parquet":
        import_optional("pyarrow.parquet", "data")
    if args.executor == "ray":
        from flowalign.utils.ray_cluster import prepare_ray

        prepare_ray("ray.data", args.address)
    if args.processes > 1 and not args.address:
        from flowalign.distributed.processes import check_fits

        check_fits(args.processes, "cpu")  # they may share a GPU, but no core


def open_job(args: argparse.Namespace) -> "ScoringJob":
    """Return the job of a command, before its weights are read."""
    from flowalign.curation.scoring.scoring_job import ScoringJob
    from flowalign.curation.scoring.table_rows import check_prompts
    from flowalign.data.readers import open_dataset, parse_columns
    from flowalign.rewards.config import load_rewards
    from flowalign.utils.local_modules import list_files

    dataset = open_dataset(args.data, args.schema, args.root, parse_columns(args.columns))
    models, text = load_rewards(*args.rewards)
    check_prompts(dataset, models)
    code = {str(file): digest_file(file) for file in list_files(text)}
    places = {"data": str(Path(args.data).resolve()), "root": str(dataset.root.resolve())}
    return ScoringJob(
        dataset,
        models,
        Path(args.out),
        batch_size=args.batch_size,
        workers=args.workers,
        limit=args.limit,
        max_frames=args.max_frames,
        max_failed_fraction=args.max_failed_fraction,
        shard=args.shard or (0, 1),
        origin={**places, "rewards": text, **({"code": code} if code else {})},
    )


def _run_shards(
    job: "ScoringJob", words: Sequence[str], count: int
) -> tuple[Sequence[int], Mapping[str, float]]:
    """Run this command once per shard, in parallel; return the blocks and the seconds."""
    from rich.console import Console

    from flowalign.curation.scoring.stats import TooManyFailures
    from flowalign.utils.subprocesses import run_all, shard_jobs

    start, log = time.perf_counter(), Console().print
    jobs = shard_jobs(words, count, job.folder / "logs", ["--summarize"])
    jobs = [replace(one, command=[*_device(i), *one.command]) for i, one in enumerate(jobs)]
    failed = run_all(jobs, count, lambda text: log(text, markup=False, highlight=False))
    if failed:
        raise TooManyFailures(f"{failed[0].last_line()}\n{len(failed)} of {count} shards failed")
    return job.parts.blocks(), {"seconds": time.perf_counter() - start, "processes": count}


def _device(i: int) -> list[str]:
    """Return a command prefix that gives each process its own accelerator, if there are several."""
    import torch

    from flowalign.utils.subprocesses import select_device

    count = torch.cuda.device_count()
    own = select_device(f"cuda:{i % count}") if count > 1 else {}
    return ["env", *(f"{name}={value}" for name, value in own.items())] if own else []


def _print_summary(args: argparse.Namespace, stats: "RunningStats", job: "ScoringJob") -> None:
    from flowalign.curation.scoring.scores_page import PAGE, PROMPTS

    folder = Path(args.out)
    rows = {
        dim: f"{known['mean']:.4g} +- {known['std']:.2g}, {known['valid']} valid"
        if known["valid"]
        else "none valid"
        for dim, known in stats.summary()["dimensions"].items()
    }
    for why, count in stats.reasons.most_common(5):
        rows[why] = f"{count} row{'s' * (count > 1)}"
    rows["page"] = str(folder / PAGE)
    if args.summarize is not None:
        rows["prompts"] = str(folder / PROMPTS)
    rows |= {f"warning: {one.spec.name}": one.caveat for one in job.models if one.caveat}
    scores = folder / f"scores.{args.format}"
    table(f"{stats.rows} rows, {stats.failed} failed: {scores}", rows)

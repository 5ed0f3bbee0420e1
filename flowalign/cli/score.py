"""Runs `flowalign score`: scores a preference dataset or a folder of media with reward models."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from flowalign.cli.meter import meter
from flowalign.cli.ranges import Parser, shard, whole
from flowalign.utils.console import table
from flowalign.utils.interrupts import exit_code, sigterm_stops
from flowalign.utils.lifeline import end_with_starter
from flowalign.utils.manifest import agree, compare

if TYPE_CHECKING:
    from flowalign.curation.scoring.job import Job, Watch
    from flowalign.curation.scoring.stats import Speed
    from flowalign.data.readers import Dataset

HELP = "Score a dataset, or a folder of media."
EXECUTORS = "local", "ray"
EXIT_FAILED, EXIT_WRONG = 1, 2
_THREADS = min(8, os.cpu_count() or 1)
_MANIFEST, _MAKER = "manifest.json", "a scoring job"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign score`."""
    add = parser.add_argument
    add(
        "data",
        help="folder of media, parquet or tar files, or one that `datasets` saved; or a .jsonl, "
        ".json, .csv, .parquet or .tar file, or a quoted pattern of some: 'shards/{000..012}.tar'",
    )
    add("--rewards", required=True, help="YAML file with a list `rewards:`, or one dotted path")
    add("--out", required=True, metavar="FOLDER", help="a folder of an earlier run is resumed")
    add("--schema", default="auto", help="default: detected by the columns")
    add("--root", metavar="FOLDER", help="where relative paths begin; default: beside the data")
    add("--format", choices=("parquet", "jsonl"), default="parquet", help="default: parquet")
    add("--batch_size", type=whole(1), default=32, help="media per batch, default 32")
    add("--workers", type=whole(1, 256), default=_THREADS, help="threads that decode")
    add("--limit", type=whole(1), help="number of records, from the first one; default: all")
    add("--max_frames", type=whole(1), help="evenly spaced frames of a video; default: all")
    add("--max_failed_fraction", type=float, default=0.05, help="share of rows, default 0.05")
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--processes",
        type=whole(1),
        default=1,
        help="processes on this machine, no more than cores; each has a GPU, or shares one",
    )
    several.add_argument(
        "--shard",
        metavar="i/n",
        type=shard,
        help="be the i-th of n processes, from 0; run once more without it to merge",
    )
    add("--executor", choices=EXECUTORS, default="local", help="what runs the processes")
    add(
        "--address",
        help="a running Ray cluster, ray://HOST:10001 or auto; default: one on this machine",
    )


def run(args: argparse.Namespace) -> int:
    """Score; returns 0, or 1 if too many rows failed, which may leave a complete table.

    Raises:
        ConfigError: The options or the data need a correction by the user.
    """
    from flowalign.utils.errors import ConfigError

    try:
        _check(args)
        if args.executor == "ray":
            return _run_on_ray(args)
        return _run_several(args) if args.processes > 1 else _run_one(args)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one process of several, which is started as `python -m flowalign.cli.score`."""
    from flowalign.rewards.checked import RewardFailure
    from flowalign.utils.errors import ConfigError

    end_with_starter()
    parser = Parser(prog="flowalign score", allow_abbrev=False)
    add_arguments(parser)
    try:
        with sigterm_stops():
            return run(parser.parse_args(argv))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_WRONG
    except RewardFailure as error:
        return _failed(str(error))
    except KeyboardInterrupt as stop:
        sys.stderr.write("stopped; what was saved is intact, the same command goes on\n")
        return exit_code(stop)


def _check(args: argparse.Namespace) -> None:
    from flowalign.curation.scoring.table import needs_pyarrow

    if not 0 <= args.max_failed_fraction <= 1:
        raise ValueError(f"--max_failed_fraction {args.max_failed_fraction} is outside [0, 1]")
    if args.format == "parquet":
        needs_pyarrow()
    if args.executor != "ray" and args.address:
        raise ValueError(f"--address {args.address} needs --executor ray")
    if args.executor == "ray" and args.shard:
        raise ValueError("--shard and --executor ray exclude each other; Ray divides the blocks")


def _run_one(args: argparse.Namespace) -> int:
    """Run the whole job, or one shard of it."""
    from flowalign.curation.scoring.job import run
    from flowalign.curation.scoring.stats import Speed
    from flowalign.curation.scoring.table import alone

    job, settings = _opened(args)
    schema = f"{args.data}: schema {job.dataset.schema.name}"
    Console().print(schema, markup=False, highlight=False)
    i, n = job.shard
    with alone(job.folder / "parts" / f".lock-{i}-of-{n}"):
        _load(job, settings)
        speed = Speed()
        return _score(args, job, speed, partial(run, job, speed=speed))


def _run_on_ray(args: argparse.Namespace) -> int:
    """Run the whole job on the workers of a Ray cluster."""
    from flowalign.curation.scoring import ray_data
    from flowalign.curation.scoring.stats import Speed
    from flowalign.curation.scoring.table import alone
    from flowalign.distributed.processes import check_fits

    ray_data.needs_ray(args.address)
    if not args.address:
        check_fits(args.processes, "cpu")  # they may share a GPU, but no core
    job, settings = _opened(args)
    with alone(job.folder / "parts" / ".lock-ray"):
        compare(job.folder / _MANIFEST, settings, _MAKER)
        cluster = ray_data.Cluster(args.processes, args.address)
        speed = Speed()
        return _score(args, job, speed, partial(cluster.run, job, partial(ready, args), speed))


def ready(args: argparse.Namespace) -> "Job":
    """Return the job of these options with its models loaded, as a worker of a cluster needs it."""
    job, settings = _opened(args)
    _load(job, settings)
    return job


def _opened(args: argparse.Namespace) -> "tuple[Job, dict[str, Any]]":
    """Return the job, whose weights are not read yet, and the settings that decide its scores."""
    from flowalign.curation.scoring.job import Job
    from flowalign.data.readers import open_dataset
    from flowalign.rewards.config import load_rewards

    dataset = open_dataset(args.data, args.schema, args.root)
    models, text = load_rewards(args.rewards)
    job = Job(
        dataset,
        models,
        Path(args.out),
        args.batch_size,
        args.workers,
        args.limit,
        args.max_frames,
        args.max_failed_fraction,
        args.shard or (0, 1),
    )
    return job, _settings(args, dataset, text)


def _load(job: "Job", settings: Mapping[str, Any]) -> None:
    """Load the models for a folder that no other settings have made."""
    from flowalign.curation.scoring.rows import fingerprint
    from flowalign.rewards.checked import load

    compare(job.folder / _MANIFEST, settings, _MAKER)
    for model in job.models:
        load(model)
    known = {"fingerprint": fingerprint(job.models)}
    agree(job.folder / _MANIFEST, {**settings, **known}, _MAKER)


def _score(
    args: argparse.Namespace,
    job: "Job",
    speed: "Speed",
    run: "Callable[[Watch], Sequence[int]]",
) -> int:
    """Score by `run`, which shows its progress and returns the blocks, and write the table."""
    from flowalign.curation.scoring.job import summarise
    from flowalign.curation.scoring.stats import TooManyFailed

    try:
        with meter(job) as watch:
            blocks = run(watch)
    except TooManyFailed as error:
        if not args.shard:
            about = {"status": "stopped", **_about(job.folder), **speed.summary()}
            summarise(job.folder, error.stats, about)
        return _failed(str(error))
    return 0 if args.shard else _finish(args, blocks, speed.summary())


def _run_several(args: argparse.Namespace) -> int:
    """Run this command once per shard, side by side, and then merge the table."""
    from flowalign.cli.shards import run_shards
    from flowalign.curation.scoring.table import Parts
    from flowalign.data.readers import open_dataset
    from flowalign.distributed.processes import check_fits
    from flowalign.rewards.config import load_rewards

    check_fits(args.processes, "cpu")  # they may share a GPU, but no core
    open_dataset(args.data, args.schema, args.root)  # a mistake is told once, before any starts
    load_rewards(args.rewards)
    start = time.perf_counter()
    if failure := run_shards(args):
        return _failed(failure)
    seconds = {"seconds": time.perf_counter() - start, "processes": args.processes}
    return _finish(args, Parts(Path(args.out) / "parts").blocks(), seconds)


def _finish(args: argparse.Namespace, blocks: Sequence[int], speed: Mapping[str, float]) -> int:
    from flowalign.curation.scoring import page as score_page
    from flowalign.curation.scoring.job import finish
    from flowalign.curation.scoring.stats import TooManyFailed
    from flowalign.curation.scoring.table import Parts
    from flowalign.data.readers import open_dataset

    folder = Path(args.out)
    stats = finish(folder, blocks, args.format, {**_about(folder), **speed})
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    dataset = open_dataset(args.data, args.schema, args.root)
    page = score_page.write(folder, Parts(folder / "parts").rows(blocks), dataset, summary)
    rows = {
        dim: f"{known['mean']:.4g} +- {known['std']:.2g}, {known['valid']} valid"
        if known["valid"]
        else "none valid"
        for dim, known in stats.summary()["dimensions"].items()
    }
    most = stats.reasons.most_common(5)
    reasons = {why: f"{count} row{'s' * (count > 1)}" for why, count in most}
    title = f"{stats.rows} rows, {stats.failed} failed: {folder / f'scores.{args.format}'}"
    table(title, rows | reasons | {"page": str(page)})
    try:
        stats.check(args.max_failed_fraction)
    except TooManyFailed as error:
        return _failed(str(error))
    return 0


def _failed(why: str) -> int:
    sys.stderr.write(f"error: {why}\n")
    return EXIT_FAILED


def _settings(args: argparse.Namespace, dataset: "Dataset", rewards: str) -> dict[str, Any]:
    """Return the settings that decide the scores; batches and processes do not."""
    from flowalign.curation.scoring.job import RECORDS_PER_PART

    return {
        "data": str(Path(args.data).resolve()),
        "root": str(dataset.root.resolve()),
        "identity": dataset.identity(),
        "schema": dataset.schema.name,
        "rewards": rewards,
        "limit": args.limit,
        "max_frames": args.max_frames,
        "records_per_part": RECORDS_PER_PART,
    }


def _about(folder: Path) -> dict[str, Any]:
    """Return the settings of the job, for the summary."""
    return json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())

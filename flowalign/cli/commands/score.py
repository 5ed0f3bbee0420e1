"""Score a preference dataset, or a folder of images or videos, with reward models."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from flowalign.cli.commands.score_progress import show_progress
from flowalign.cli.commands.score_shards import run_shards
from flowalign.curation.scoring import ray_data
from flowalign.curation.scoring import scores_page as score_page
from flowalign.curation.scoring import scoring_job as scoring
from flowalign.curation.scoring.part_files import PartFiles, hold_lock, needs_pyarrow
from flowalign.curation.scoring.prompt_means import write_prompts
from flowalign.curation.scoring.scoring_job import ScoringJob, Watch
from flowalign.curation.scoring.stats import Throughput, TooManyFailures
from flowalign.curation.scoring.table_rows import join_fingerprints
from flowalign.data.readers import Dataset, open_dataset
from flowalign.distributed.processes import check_fits
from flowalign.rewards.checked import load
from flowalign.rewards.config import load_rewards
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.folders import check_folder_path
from flowalign.utils.manifest import agree, compare
from flowalign.utils.ray_cluster import prepare_ray

EXIT_FAILED = 1
_MANIFEST, _MAKER = "manifest.json", "a scoring job"


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Score; return 0, or 1 if too many rows failed, possibly with a complete table."""
    _check(args)
    if args.executor == "ray":
        return _run_on_ray(args)
    return _run_shards(args) if args.processes > 1 else _run_one(args)


def _check(args: argparse.Namespace) -> None:
    check_folder_path(Path(args.out))
    if not 0 <= args.max_failed_fraction <= 1:
        raise ValueError(f"--max_failed_fraction {args.max_failed_fraction} is outside [0, 1]")
    if args.summarize is not None and args.shard:
        raise ValueError("--summarize needs all shards: set it in the run without --shard")
    if args.format == "parquet":
        needs_pyarrow()
    if args.executor != "ray" and args.address:
        raise ValueError(f"--address {args.address} needs --executor ray")
    if args.executor == "ray" and args.shard:
        raise ValueError("--shard and --executor ray exclude each other; Ray divides the blocks")


def _run_one(args: argparse.Namespace) -> int:
    """Run the whole job, or one shard of it."""
    job, settings = _open_job(args)
    schema = f"{args.data}: schema {job.dataset.schema.name}"
    Console().print(schema, markup=False, highlight=False)
    i, n = job.shard
    with hold_lock(job.folder / "parts" / f".lock-{i}-of-{n}"):
        _load(job, settings)
        speed = Throughput()
        return _score(args, job, speed, partial(scoring.run, job, speed=speed))


def _run_on_ray(args: argparse.Namespace) -> int:
    """Run the whole job on the workers of a Ray cluster."""
    prepare_ray("ray.data", args.address)
    if not args.address:
        check_fits(args.processes, "cpu")  # they may share a GPU, but no core
    job, settings = _open_job(args)
    with hold_lock(job.folder / "parts" / ".lock-ray"):
        compare(job.folder / _MANIFEST, settings, _MAKER)
        cluster = ray_data.ScoringCluster(args.processes, args.address)
        speed = Throughput()
        return _score(args, job, speed, partial(cluster.run, job, partial(load_job, args), speed))


def load_job(args: argparse.Namespace) -> ScoringJob:
    """Return the job with loaded models, for a worker of a cluster."""
    job, settings = _open_job(args)
    _load(job, settings)
    return job


def _open_job(args: argparse.Namespace) -> tuple[ScoringJob, dict[str, Any]]:
    """Return the job, before its weights are read, and the settings that decide its scores."""
    dataset = open_dataset(args.data, args.schema, args.root)
    models, text = load_rewards(args.rewards)
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
    return job, _build_settings(args, dataset, text)


def _load(job: ScoringJob, settings: Mapping[str, Any]) -> None:
    """Load the models, after a check that the folder holds no results of other settings."""
    compare(job.folder / _MANIFEST, settings, _MAKER)
    for model in job.models:
        load(model)
    known = {"fingerprint": join_fingerprints(job.models)}
    agree(job.folder / _MANIFEST, {**settings, **known}, _MAKER)


def _score(
    args: argparse.Namespace,
    job: ScoringJob,
    speed: Throughput,
    run: Callable[[Watch], Sequence[int]],
) -> int:
    """Run `run`, which returns the scored blocks, with a progress display; then write the table."""
    try:
        with show_progress(job) as watch:
            blocks = run(watch)
    except TooManyFailures as error:
        if not args.shard:
            about = {"status": "stopped", **_read_manifest(job.folder), **speed.summary()}
            scoring.write_summary(job.folder, error.stats, about)
        return _fail(str(error))
    return 0 if args.shard else _finish(args, blocks, speed.summary())


def _run_shards(args: argparse.Namespace) -> int:
    """Run this command once per shard, in parallel, and then merge the table."""
    check_fits(args.processes, "cpu")  # they may share a GPU, but no core
    open_dataset(args.data, args.schema, args.root)  # report errors once, before any starts
    load_rewards(args.rewards)
    start = time.perf_counter()
    if failure := run_shards(args):
        return _fail(failure)
    seconds = {"seconds": time.perf_counter() - start, "processes": args.processes}
    return _finish(args, PartFiles(Path(args.out) / "parts").blocks(), seconds)


def _finish(args: argparse.Namespace, blocks: Sequence[int], speed: Mapping[str, float]) -> int:
    folder = Path(args.out)
    stats = scoring.finish(folder, blocks, args.format, {**_read_manifest(folder), **speed})
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    dataset = open_dataset(args.data, args.schema, args.root)
    page = score_page.write(folder, PartFiles(folder / "parts").rows(blocks), dataset, summary)
    rows = {
        dim: f"{known['mean']:.4g} +- {known['std']:.2g}, {known['valid']} valid"
        if known["valid"]
        else "none valid"
        for dim, known in stats.summary()["dimensions"].items()
    }
    most = stats.reasons.most_common(5)
    reasons = {why: f"{count} row{'s' * (count > 1)}" for why, count in most}
    title = f"{stats.rows} rows, {stats.failed} failed: {folder / f'scores.{args.format}'}"
    models, _ = load_rewards(args.rewards)
    warnings = {f"warning: {one.spec.name}": one.caveat for one in models if one.caveat}
    pages = {"page": str(page)}
    if args.summarize is not None:
        parts = PartFiles(folder / "parts").rows(blocks)
        pages["prompts"] = str(write_prompts(folder, parts, args.summarize))
    table(title, rows | reasons | pages | warnings)
    try:
        stats.check(args.max_failed_fraction)
    except TooManyFailures as error:
        return _fail(str(error))
    return 0


def _fail(why: str) -> int:
    sys.stderr.write(f"error: {why}\n")
    return EXIT_FAILED


def _build_settings(args: argparse.Namespace, dataset: Dataset, rewards: str) -> dict[str, Any]:
    """Return the settings that determine the scores; batch size and processes do not."""
    return {
        "data": str(Path(args.data).resolve()),
        "root": str(dataset.root.resolve()),
        "identity": dataset.identity(),
        "schema": dataset.schema.name,
        "rewards": rewards,
        "limit": args.limit,
        "max_frames": args.max_frames,
        "records_per_part": scoring.RECORDS_PER_PART,
    }


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the settings of the job, for the summary."""
    return json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))

"""Runs `flowalign score`: scores a preference dataset or a folder of media with reward models."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flowalign.cli.ranges import Parser, shard, whole
from flowalign.utils.console import table
from flowalign.utils.interrupts import exit_code, sigterm_stops
from flowalign.utils.lifeline import end_with_starter
from flowalign.utils.manifest import agree, compare

if TYPE_CHECKING:
    from flowalign.curation.scoring.job import Job, Watch
    from flowalign.curation.scoring.stats import RunningStats, Speed
    from flowalign.data.readers import Dataset

HELP = "Score a dataset, or a folder of media."
EXIT_FAILED, EXIT_WRONG = 1, 2
_SECONDS_BETWEEN_LINES, _THREADS = 5.0, min(8, os.cpu_count() or 1)
_MANIFEST, _MAKER = "manifest.json", "a scoring job"
_PASSED_ON = (
    *("rewards", "out", "schema", "root", "format", "batch_size", "workers", "limit"),
    *("max_frames", "max_failed_fraction"),
)


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


def run(args: argparse.Namespace) -> int:
    """Score; returns 0, or 1 if too many rows failed, which may leave a complete table.

    Raises:
        ConfigError: The options or the data need a correction by the user.
    """
    from flowalign.utils.errors import ConfigError

    try:
        _check(args)
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


def _run_one(args: argparse.Namespace) -> int:
    """Run the whole job, or one shard of it."""
    from flowalign.curation.scoring.job import Job
    from flowalign.curation.scoring.rows import fingerprint
    from flowalign.curation.scoring.stats import Speed
    from flowalign.curation.scoring.table import alone
    from flowalign.data.readers import open_dataset
    from flowalign.rewards.checked import load
    from flowalign.rewards.config import load_rewards

    dataset = open_dataset(args.data, args.schema, args.root)
    models, text = load_rewards(args.rewards)
    i, n = args.shard or (0, 1)
    job = Job(
        dataset,
        models,
        Path(args.out),
        args.batch_size,
        args.workers,
        args.limit,
        args.max_frames,
        args.max_failed_fraction,
        (i, n),
    )
    Console().print(f"{args.data}: schema {dataset.schema.name}", markup=False, highlight=False)
    settings = _settings(args, dataset, text)
    with alone(job.folder / "parts" / f".lock-{i}-of-{n}"):
        compare(job.folder / _MANIFEST, settings, _MAKER)
        for model in models:
            load(model)
        agree(job.folder / _MANIFEST, settings | {"fingerprint": fingerprint(models)}, _MAKER)
        return _score(args, job, Speed())


def _score(args: argparse.Namespace, job: "Job", speed: "Speed") -> int:
    from flowalign.curation.scoring.job import run, summarise
    from flowalign.curation.scoring.stats import TooManyFailed

    try:
        with _meter(job) as watch:
            blocks = run(job, watch, speed)
    except TooManyFailed as error:
        if not args.shard:
            about = {"status": "stopped", **_about(job.folder), **speed.summary()}
            summarise(job.folder, error.stats, about)
        return _failed(str(error))
    return 0 if args.shard else _finish(args, blocks, speed.summary())


def _run_several(args: argparse.Namespace) -> int:
    """Run this command once per shard, side by side, and then merge the table."""
    from flowalign.curation.scoring.table import Parts
    from flowalign.data.readers import open_dataset
    from flowalign.distributed.processes import check_fits
    from flowalign.rewards.config import load_rewards
    from flowalign.utils.subprocesses import Job, run_all

    check_fits(args.processes, "cpu")  # they may share a GPU, but no core
    open_dataset(args.data, args.schema, args.root)  # a mistake is told once, before any starts
    load_rewards(args.rewards)
    log = Console().print
    folder = Path(args.out)
    jobs = [
        Job(f"shard {i}", [*_device(i), *_shard_command(args, i)], folder / "logs" / f"{i}.log")
        for i in range(args.processes)
    ]
    start = time.perf_counter()
    failed = run_all(jobs, len(jobs), lambda text: log(text, markup=False, highlight=False))
    if failed:
        return _failed(f"{_last_line(failed[0].log)}\n{len(failed)} of {len(jobs)} shards failed")
    seconds = {"seconds": time.perf_counter() - start, "processes": args.processes}
    return _finish(args, Parts(folder / "parts").blocks(), seconds)


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


def _shard_command(args: argparse.Namespace, i: int) -> list[str]:
    command = [sys.executable, "-m", "flowalign.cli.score", args.data]
    for name, value in vars(args).items():
        if name in _PASSED_ON and value is not None:
            command += [f"--{name}", str(value)]
    return [*command, "--shard", f"{i}/{args.processes}"]


def _device(i: int) -> list[str]:
    """Return a command prefix that gives each process its own accelerator, if there are several."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return ["env", f"CUDA_VISIBLE_DEVICES={names.split(',')[i % count]}"]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{log}: {lines[-1].removeprefix('error: ') if lines else 'no output'}"


@contextlib.contextmanager
def _meter(job: "Job") -> Iterator["Watch"]:
    """Show progress: a bar on a terminal; in a log, a line at most every 5 seconds."""
    columns = (
        TextColumn("records"),
        MofNCompleteColumn(),
        BarColumn(None),
        TextColumn("{task.fields[status]}"),
    )
    bar = Progress(*columns, console=Console(), expand=True, disable=not Console().is_terminal)
    task = bar.add_task("", total=job.share(), status="")
    printed_at = time.monotonic()

    def watch(stats: "RunningStats", speed: "Speed") -> None:
        nonlocal printed_at
        now = speed.summary()
        status = (
            f"{stats.failed} failed  {now['rows_per_second']:.1f} rows/s  "
            f"{now['share_in_model']:.0%} in the model"
        )
        bar.update(task, completed=stats.records, status=status)
        if bar.disable and time.monotonic() - printed_at >= _SECONDS_BETWEEN_LINES:
            bar.console.print(f"{stats.rows} rows  {status}", markup=False, highlight=False)
            printed_at = time.monotonic()

    with bar:
        yield watch


if __name__ == "__main__":
    sys.exit(main())

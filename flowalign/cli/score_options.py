"""Score a preference dataset, or a folder of images or videos: `flowalign score`."""

import argparse
import os

from flowalign.cli.options import add_executor, shard, whole

HELP = "Score a dataset, or a folder of images or videos."
_THREADS = min(8, os.cpu_count() or 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign score`."""
    add = parser.add_argument
    add(
        "data",
        help="folder of images, videos, parquet or tar files, or a folder saved by `datasets`; or "
        "a .jsonl, .json, .csv, .parquet or .tar file, or a quoted pattern such as "
        "'shards/{000..012}.tar'",
    )
    add("--rewards", required=True, help="YAML file with a list `rewards:`, or one dotted path")
    add("--out", required=True, metavar="FOLDER", help="output folder; an earlier job is resumed")
    add("--schema", default="auto", help="schema of the data (default: detected from the columns)")
    add("--root", metavar="FOLDER", help="base of relative paths (default: folder of the data)")
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

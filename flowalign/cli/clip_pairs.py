"""Make training pairs from real videos, with the policy itself: `flowalign clip-pairs`."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.options import add_columns, add_config_file, shard
from flowalign.utils.console import Progress, say, table
from flowalign.utils.folders import check_folder_path, make_folder, record_settings

if TYPE_CHECKING:
    from flowalign.extra.clip_pairs import clip_pairs_job

HELP = "Make training pairs from real videos, by noising and denoising them."
EXIT_FAILED = 1
_LISTED = 4
"""Largest number of reasons that an error message lists."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, its overrides, `--columns` and `--shard`."""
    add_config_file(parser)
    add_columns(parser)
    parser.add_argument(
        "--shard",
        metavar="i/n",
        type=shard,
        default=(0, 1),
        help="run as the i-th of n processes, from 0; the last one to finish writes the lists",
    )


def run(args: argparse.Namespace) -> int:
    """Make pairs; return 0, or 1 if too many videos are unusable or no pair was made."""
    from flowalign.data.readers import parse_columns
    from flowalign.extra.clip_pairs import clip_pairs_job
    from flowalign.utils.typed_settings import load_typed

    columns = parse_columns(args.columns)
    added = [f"columns={json.dumps(columns)}"] if columns else []
    cfg, text = load_typed(clip_pairs_job.ClipPairs, args.config, [*args.overrides, *added])
    outcome = clip_pairs_job.finish(cfg, _make_batches(cfg, text, args.shard))
    if outcome is None:
        say(f"shard {args.shard[0]}/{args.shard[1]} is done; other shards are not")
        return 0
    return _print_summary(cfg, outcome)


def _make_batches(cfg: "clip_pairs_job.ClipPairs", text: str, shard: tuple[int, int]) -> int:
    """Make the missing batches; return the number of batches of the dataset."""
    from rich.console import Console

    from flowalign.distributed.processes import join
    from flowalign.extra.clip_pairs import clip_pairs_job

    dataset, folder = cfg.dataset(), Path(cfg.output_dir)
    check_folder_path(folder, "output_dir")
    make_folder(folder)
    record_settings(
        folder / clip_pairs_job.MANIFEST,
        clip_pairs_job.settings_of(text, dataset),
        "`flowalign clip-pairs`",
    )
    size = dataset.size() or sum(1 for _ in dataset)
    total = min(size, cfg.limit or size)
    with Progress(total, console=Console(stderr=True)) as progress:
        return clip_pairs_job.run(
            cfg,
            dataset,
            shard,
            join=lambda: join(cfg.device).device,
            watch=lambda done: progress.update(done - 1, {}),
        )


def _print_summary(cfg: "clip_pairs_job.ClipPairs", outcome: "clip_pairs_job.BatchOutcome") -> int:
    """Print the number of pairs, their cost and the dropped videos; return the exit code."""
    folder, report, costs = Path(cfg.output_dir), outcome.drop_report(), outcome.costs
    evaluations = costs["sampling_evaluations"] + costs["training_evaluations"]
    clips = len(outcome.rows) + report.total
    rows = {
        "network evaluations": f"{evaluations:,.0f}",
        "reward calls": f"{costs['reward_calls']:,.0f}",
        "seconds": f"{costs['seconds']:,.1f}",
        "videos dropped": "\n".join([f"{report.total:,} of {clips:,}", *report.lines()]),
    }
    table(f"{len(outcome.rows):,} pairs: {folder}", rows)
    too_many = len(outcome.faults) > cfg.max_dropped_fraction * clips
    if outcome.rows and not too_many:
        return 0
    head = f"{len(outcome.faults)} of {clips} videos cannot be used; max_dropped_fraction is "
    lines = [head + f"{cfg.max_dropped_fraction:g}", *report.lines()[:_LISTED]]
    sys.stderr.write("error: " + "\n".join(line[:300] for line in lines) + "\n")
    return EXIT_FAILED

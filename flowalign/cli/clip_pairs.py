"""Runs `flowalign clip-pairs`: makes pairs to train on from real clips, with the policy itself."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flowalign.cli.messages import add_config_file
from flowalign.cli.ranges import shard
from flowalign.utils.console import Progress, table
from flowalign.utils.errors import ConfigError
from flowalign.utils.interrupts import exit_code

if TYPE_CHECKING:
    from flowalign.curation.clip_pairs.job import Outcome
    from flowalign.curation.clip_pairs.run import ClipPairs

HELP = "Make pairs to train on of real clips, by noising and denoising them."
EXIT_FAILED = 1
_LISTED = 4
"""Largest number of reasons that an error message lists."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, its overrides and `--shard`."""
    add_config_file(parser)
    parser.add_argument(
        "--shard",
        metavar="i/n",
        type=shard,
        default=(0, 1),
        help="be the i-th of n processes, from 0; whoever comes last writes the lists",
    )


def run(args: argparse.Namespace) -> int:
    """Make pairs; returns 0, or 1 if too many clips are unusable or no pair was made.

    Raises:
        ConfigError: The run file or the data need a correction by the user.
    """
    from flowalign.curation.clip_pairs.job import finish
    from flowalign.curation.clip_pairs.run import load

    log = Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print
    try:
        cfg, text = load(args.config, args.overrides)
        outcome = finish(cfg, _make(cfg, text, args.shard))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt as stop:
        log("stopped; the same command goes on from here")
        return exit_code(stop)
    if outcome is None:
        log(f"shard {args.shard[0]}/{args.shard[1]} is done, others are not")
        return 0
    return _print_summary(cfg, outcome)


def _make(cfg: "ClipPairs", text: str, shard: tuple[int, int]) -> int:
    """Make the missing batches; returns the number of batches of the dataset."""
    from flowalign.curation.clip_pairs.job import MANIFEST, run
    from flowalign.curation.clip_pairs.run import settings_of
    from flowalign.utils.folders import make_folder
    from flowalign.utils.manifest import agree

    dataset, folder = cfg.dataset(), Path(cfg.output_dir)
    make_folder(folder)
    agree(folder / MANIFEST, settings_of(text, dataset), "`flowalign clip-pairs`")
    size = dataset.size() or sum(1 for _ in dataset)
    total = min(size, cfg.limit or size)
    with Progress(total, console=Console(stderr=True)) as progress:
        return run(cfg, dataset, shard, lambda done: progress.update(done - 1, {}))


def _print_summary(cfg: "ClipPairs", outcome: "Outcome") -> int:
    """Print pairs, costs and drops; returns the exit code."""
    folder, report, costs = Path(cfg.output_dir), outcome.drop_report(), outcome.costs
    evaluations = costs["sampling_evaluations"] + costs["training_evaluations"]
    clips = len(outcome.rows) + report.total
    rows = {
        "network evaluations": f"{evaluations:,.0f}",
        "reward calls": f"{costs['reward_calls']:,.0f}",
        "seconds": f"{costs['seconds']:,.1f}",
        "clips dropped": "\n".join([f"{report.total:,} of {clips:,}", *report.lines()]),
    }
    table(f"{len(outcome.rows):,} pairs: {folder}", rows)
    too_many = len(outcome.errors) > cfg.max_dropped_fraction * clips
    if outcome.rows and not too_many:
        return 0
    head = f"{len(outcome.errors)} of {clips} clips cannot be used; max_dropped_fraction is "
    lines = [head + f"{cfg.max_dropped_fraction:g}", *report.lines()[:_LISTED]]
    sys.stderr.write("error: " + "\n".join(line[:300] for line in lines) + "\n")
    return EXIT_FAILED

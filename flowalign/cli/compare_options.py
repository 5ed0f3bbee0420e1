"""Train several run files with several seeds, and compare: `flowalign compare`."""

import argparse
import os

from flowalign.cli.options import SEED, whole

HELP = "Train several run files with several seeds, and compare."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the seeds and the output folder."""
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="config",
        help="run files, the baseline first; join several files of one method by +; "
        "other --a.b VALUE options override all runs",
    )
    parser.add_argument(
        "--base",
        nargs="+",
        default=[],
        metavar="CONFIG",
        help="run files before those of each method",
    )
    parser.add_argument(
        "--seeds", type=whole(*SEED), nargs="+", default=[0, 1, 2], help="default: 0 1 2"
    )
    parser.add_argument("--out", default="runs/compare", help="default: runs/compare")
    parser.add_argument(
        "--jobs",
        type=whole(1, os.cpu_count() or 1),
        help="number of parallel runs (default: as many as the cores allow, one on a GPU)",
    )
    parser.add_argument(
        "--metric", help="held-out dimension (default: exact_match, or the only one)"
    )
    parser.add_argument(
        "--benchmark",
        metavar="NAME",
        help="benchmark of the trained weights: a card of `flowalign eval` with scorers",
    )
    parser.add_argument("--data", metavar="FILE", help="official prompt file of the benchmark")
    parser.set_defaults(takes_overrides=True)

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
        help="run files, the baseline first, several of one method joined by +; "
        "further --a.b VALUE override them all",
    )
    parser.add_argument(
        "--base", nargs="+", default=[], metavar="CONFIG", help="run files before those of each"
    )
    parser.add_argument(
        "--seeds", type=whole(*SEED), nargs="+", default=[0, 1, 2], help="default: 0 1 2"
    )
    parser.add_argument("--out", default="runs/compare", help="default: runs/compare")
    parser.add_argument(
        "--jobs",
        type=whole(1, os.cpu_count() or 1),
        help="runs at once, no more than cores; default: as the cores allow",
    )
    parser.add_argument(
        "--metric", help="held-out dimension; default: exact_match, or the only one"
    )
    parser.set_defaults(takes_overrides=True)

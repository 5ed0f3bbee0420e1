"""Time the stages of a step against the bare network evaluations: `flowalign bench`."""

import argparse

from flowalign.cli.options import add_config, whole

HELP = "Time the stages of a step against the bare network evaluations."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the number of repeats, and the choice of what to time."""
    add_config(parser)
    parser.add_argument("--repeats", type=whole(1), default=3, help="default: 3")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--values",
        action="store_true",
        help="time the values of all states instead: batched, and one after another",
    )

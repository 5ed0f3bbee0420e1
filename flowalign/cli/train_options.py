"""Train from a run file: `flowalign train`."""

import argparse

from flowalign.cli.options import add_config, add_processes

HELP = "Train from a run file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the number of processes, and the treatment of an earlier run."""
    add_config(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="continue from the newest checkpoint, or from this one",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run")
    add_processes(parser)

"""Validate a run file without reading weights, and print its plan: `flowalign check`."""

import argparse

from flowalign.cli.options import add_config, add_processes

HELP = "Validate a run file without reading weights, and print its plan."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the number of processes, and the choice to print settings."""
    add_config(parser)
    add_processes(parser)
    parser.add_argument(
        "--print",
        action="store_true",
        dest="shows_settings",
        help="print the complete settings instead, each with the file that set it",
    )

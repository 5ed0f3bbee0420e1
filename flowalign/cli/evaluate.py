"""Evaluate a run file's model, or a checkpoint of it: `flowalign eval`."""

import argparse

from flowalign.cli.options import add_config, add_processes

HELP = "Evaluate a run file's model, or a checkpoint of it, on its evaluation prompts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the weights and the number of processes."""
    add_config(parser)
    parser.add_argument("--weights", metavar="CHECKPOINT", help="folder with trained weights")
    add_processes(parser)

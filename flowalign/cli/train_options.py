"""Train from a run file: `flowalign train`."""

import argparse

from flowalign.cli.options import add_config, add_executor, add_processes, address, whole

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
    parser.add_argument(
        "--restarts",
        type=whole(0),
        default=0,
        help="restarts from the newest checkpoint after a process failed (default: 0)",
    )
    parser.add_argument(
        "--nodes",
        type=whole(1),
        default=1,
        help="machines that run this command with as many processes each (default: 1)",
    )
    parser.add_argument(
        "--rendezvous",
        type=address,
        metavar="HOST:PORT",
        help="address on one of the machines where all of them meet",
    )
    add_executor(parser)

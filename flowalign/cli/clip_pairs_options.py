"""Make training pairs from real videos, with the policy itself: `flowalign clip-pairs`."""

import argparse

from flowalign.cli.options import add_config_file, shard

HELP = "Make training pairs from real videos, by noising and denoising them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, its overrides and `--shard`."""
    add_config_file(parser)
    parser.add_argument(
        "--shard",
        metavar="i/n",
        type=shard,
        default=(0, 1),
        help="run as the i-th of n processes, from 0; the last one to finish writes the lists",
    )

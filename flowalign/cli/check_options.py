"""Validate a run file without reading weights, and print its plan: `flowalign check`."""

import argparse

from flowalign.cli.options import add_config, add_processes, number, whole

HELP = "Validate a run file without reading weights, and print its plan."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the processes, the choice to print settings, and the capacity plan."""
    add_config(parser)
    add_processes(parser)
    parser.add_argument(
        "--print",
        action="store_true",
        dest="shows_settings",
        help="print the complete settings instead, each with the file that set it",
    )
    add = parser.add_argument_group("seconds per step on many GPUs").add_argument
    add("--gpus", type=whole(1), metavar="N", help="number of GPUs, one process each")
    add("--gpu", metavar="TYPE", help="type of the GPUs, such as h100-80gb")
    add(
        "--utilization",
        type=number(0.01, 1.0),
        default=0.4,
        help="share of the peak rate in bf16 that is reached (default: 0.4)",
    )
    add(
        "--costs",
        metavar="FILE",
        help="measured costs of flowalign bench --out, instead of counted operations",
    )
    add("--reward-seconds", type=number(0.0), metavar="S", help="seconds of a GPU per reward call")

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
    _add_failures(parser)


def _add_failures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("failures and stragglers, with --gpus").add_argument
    add("--simulate", action="store_true", help="simulate runs with and without staleness")
    add(
        "--failure-hours",
        type=number(0.1),
        default=50_000.0,
        metavar="H",
        help="mean time between failures of a GPU (default: 50000, as in the training of Llama 3)",
    )
    add(
        "--restart-seconds",
        type=number(0.0),
        default=600.0,
        metavar="S",
        help="time from a failure until training continues (default: 600)",
    )
    add(
        "--spread",
        type=number(0.0),
        default=0.1,
        help="standard deviation of the logarithm of stage times (default: 0.1)",
    )

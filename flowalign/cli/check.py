"""Validate a run file without reading weights, and print its plan: `flowalign check`."""

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING

from flowalign.cli.options import Parser, add_config, add_processes, number, read_settings, whole
from flowalign.utils.console import table

if TYPE_CHECKING:
    from flowalign.runs.capacity import Cluster

HELP = "Validate a run file without reading weights, and print its plan."
_LIST = re.compile(r"\[\d+(?:, \d+){4,}\]")


def add_arguments(parser: Parser) -> None:
    """Add the run files, the processes, the choice to print settings, and the capacity plan."""
    add_config(parser)
    add_processes(parser)
    parser.add_argument(
        "--print",
        action="store_true",
        dest="shows_settings",
        help="print the complete settings instead, each with the file that set it",
    )
    parser.add_argument("--full", action="store_true", help="print every row of the plan")
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
    parser.rules += (
        "--gpu needs --gpus N",
        "--costs needs --gpus N",
        "--reward-seconds needs --gpus N",
        "--gpus needs --gpu TYPE or --costs FILE: a type is for example h100-80gb",
        "--gpus excludes --processes: it starts one process per GPU",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan or the settings, and return 0; raise ValueError for an unusable run file."""
    from flowalign.runs.capacity import capacity_rows
    from flowalign.runs.config import load_with_origins
    from flowalign.runs.planning import plan, shorten_plan
    from flowalign.utils.local_modules import list_files

    loaded = load_with_origins(*read_settings(args))
    if args.shows_settings:
        sys.stdout.write(loaded.annotate())
    else:
        settings = loaded.run
        settings.recipe.check_data(settings.context(settings.build_rewards()))
        cluster = _read_cluster(args)
        world = cluster.count if cluster else args.processes
        rows, title = plan(settings, world), f"plan of {' '.join(args.config)}"
        if files := list_files(loaded.text):
            rows["warning: runs code"] = " ".join(map(os.path.relpath, files))
        if args.full:
            table(title, {name: join_ranges(value) for name, value in rows.items()})
        else:
            time = "--gpus N --gpu TYPE estimates the seconds per step"
            short = shorten_plan(rows) | ({} if cluster else {"time": time})
            table(f"{title} (every row: --full)", short)
        if cluster:
            table(f"step on {cluster.count} x {cluster.name}", capacity_rows(settings, cluster))
    return 0


def join_ranges(text: str) -> str:
    """Return a text with lists of five or more consecutive numbers as ranges, such as [0-18]."""
    return _LIST.sub(lambda found: _join_range(found[0]), text)


def _join_range(text: str) -> str:
    numbers = [int(word) for word in text[1:-1].split(",")]
    consecutive = numbers == [*range(numbers[0], numbers[-1] + 1)]
    return f"[{numbers[0]}-{numbers[-1]}]" if consecutive else text


def _read_cluster(args: argparse.Namespace) -> "Cluster | None":
    """Return the GPUs of the capacity plan, if it is asked for."""
    from flowalign.runs.capacity import Cluster, read_costs
    from flowalign.runs.planning import find_gpu

    if args.gpus is None:
        return None
    return Cluster(
        count=args.gpus,
        name=args.gpu or "GPUs",
        gpu=find_gpu(args.gpu) if args.gpu else None,
        utilization=args.utilization,
        measured=read_costs(args.costs) if args.costs else None,
        reward=args.reward_seconds,
    )

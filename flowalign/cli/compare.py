"""Train several run files with several seeds, and compare: `flowalign compare`."""

import argparse
import os
from pathlib import Path

from flowalign.cli.messages import UsageError, complain, printer
from flowalign.cli.ranges import SEED, whole

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
    parser.add_argument("--metric", help="held-out dimension; default: strict, or the only one")


def run(args: argparse.Namespace) -> int:
    """Write the page and return 0; return 130 or 143 if stopped; a repeat continues."""
    from flowalign.reports.comparison_page import with_std
    from flowalign.runs import compare as comparing
    from flowalign.utils.console import table
    from flowalign.utils.interrupts import exit_code

    settings = [c for c in args.configs if "=" in c]  # a.b=c, as elsewhere
    files = [[*args.base, *c.split("+")] for c in args.configs if "=" not in c]
    overrides, out = [*settings, *args.overrides], Path(args.out)
    request = comparing.Request(files, overrides, args.seeds, out, args.jobs, args.metric)
    try:
        result = comparing.compare(request, printer())
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt as stop:
        told = RuntimeError("stopped; the same command goes on from here")
        return complain(told, exit_code(stop))
    finals = {row.method.name: with_std(row.final) for row in result.rows}
    table(f"held-out {result.metric} after training", finals)
    printer()(f"comparison: {out / 'compare.html'}")
    return 0

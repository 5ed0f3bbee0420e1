"""Train several run files with several seeds, and compare: `flowalign compare`."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.messages import UsageError, complain, printer
from flowalign.cli.ranges import SEED, whole

if TYPE_CHECKING:
    from flowalign.reports.comparison import Comparison

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
    from flowalign.runs import compare as comparing
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
    _show(result)
    printer()(f"comparison: {out / 'compare.html'}")
    return 0


def _show(comparison: "Comparison") -> None:
    """Print the values after training and at each cost that all runs reached, with their spread."""
    from flowalign.reports.comparison_chart import DRAWN, spent_by_all, words
    from flowalign.reports.comparison_page import count, score, with_std
    from flowalign.utils.console import table

    rows, least = comparison.rows, "smallest difference seen"
    finals = {row.method.name: with_std(row.final) for row in rows}
    finals[least] = score(comparison.smallest_final)
    table(f"held-out {comparison.metric} after training", finals)
    for axis in spent_by_all(comparison, DRAWN):
        values = {row.method.name: with_std(row.at_budget[axis]) for row in rows}
        values[least] = score(comparison.smallest[axis])
        table(f"at {count(comparison.budgets[axis])} {words(axis)}", values)

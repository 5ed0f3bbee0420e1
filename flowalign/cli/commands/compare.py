"""Train several run files with several seeds, and print a comparison."""

import argparse
from pathlib import Path

from flowalign.cli.commands.common import get_log
from flowalign.reports.comparison import Comparison
from flowalign.reports.comparison_chart import DRAWN, spent_by_all, words
from flowalign.reports.comparison_page import count, score, with_std
from flowalign.studies.compare import ComparisonRequest, compare
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.folders import check_folder_path


def run(args: argparse.Namespace) -> int:
    """Write the page and return 0; a repeated command continues."""
    settings = [c for c in args.configs if "=" in c]  # overrides a.b=c
    files = [[*args.base, *c.split("+")] for c in args.configs if "=" not in c]
    overrides, out = [*settings, *args.overrides], Path(args.out)
    request = ComparisonRequest(files, overrides, args.seeds, out, args.jobs, args.metric)
    with convert_value_errors():
        check_folder_path(out)
        result = compare(request, get_log())
    _print_tables(result)
    get_log()(f"comparison: {out / 'compare.html'}")
    return 0


def _print_tables(comparison: Comparison) -> None:
    """Print the values after training, and at each cost that all runs reached, with their std."""
    rows, least = comparison.rows, "smallest detectable difference"
    finals = {row.method.name: with_std(row.final) for row in rows}
    finals[least] = score(comparison.smallest_final)
    table(f"held-out {comparison.metric} after training", finals)
    for axis in spent_by_all(comparison, DRAWN):
        values = {row.method.name: with_std(row.at_budget[axis]) for row in rows}
        values[least] = score(comparison.smallest[axis])
        table(f"at {count(comparison.budgets[axis])} {words(axis)}", values)

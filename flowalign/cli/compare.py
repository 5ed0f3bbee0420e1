"""Train several run files with several seeds, and compare: `flowalign compare`."""

import argparse
import os
from pathlib import Path

from flowalign.cli.options import SEED, Parser, whole
from flowalign.utils.console import get_log, table
from flowalign.utils.folders import check_folder_path

HELP = "Train several run files with several seeds, and compare."


def add_arguments(parser: Parser) -> None:
    """Add the run files, the seeds and the output folder."""
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="config",
        help="run files, the baseline first; join several files of one method by +; "
        "other --a.b VALUE options override all runs",
    )
    parser.add_argument(
        "--base",
        nargs="+",
        default=[],
        metavar="CONFIG",
        help="run files before those of each method",
    )
    parser.add_argument(
        "--seeds", type=whole(*SEED), nargs="+", default=[0, 1, 2], help="default: 0 1 2"
    )
    parser.add_argument("--out", default="runs/compare", help="default: runs/compare")
    parser.add_argument(
        "--jobs",
        type=whole(1, os.cpu_count() or 1),
        help="number of parallel runs (default: as many as the cores allow, one on a GPU)",
    )
    parser.add_argument(
        "--metric", help="held-out dimension (default: exact_match, or the only one)"
    )
    parser.add_argument(
        "--benchmark",
        metavar="NAME",
        help="benchmark of the trained weights: a card of `flowalign eval` with scorers",
    )
    parser.add_argument("--data", metavar="FILE", help="official prompt file of the benchmark")
    parser.set_defaults(takes_overrides=True)
    parser.rules += ("--data needs --benchmark NAME",)


def run(args: argparse.Namespace) -> int:
    """Write the page and return 0; a repeated command continues."""
    from flowalign.studies.compare import ComparisonRequest, compare
    from flowalign.studies.compare_benchmark import evaluate_benchmark
    from flowalign.studies.comparison_page import describe_benchmark, describe_results

    settings = [c for c in args.configs if "=" in c]  # overrides a.b=c
    files = [[*args.base, *c.split("+")] for c in args.configs if "=" not in c]
    overrides, out, log = [*settings, *args.overrides], Path(args.out), get_log()
    _check_benchmark(args)
    request = ComparisonRequest(files, overrides, args.seeds, out, args.jobs, args.metric)
    check_folder_path(out)
    result = compare(request, log)
    for title, rows in describe_results(result).items():
        table(title, rows)
    if args.benchmark:
        lines = evaluate_benchmark(request, args.benchmark, args.data, result, log)
        for title, rows in describe_benchmark(args.benchmark, lines).items():
            table(title, rows)
    log(f"comparison: {out / 'compare.html'}")
    return 0


def _check_benchmark(args: argparse.Namespace) -> None:
    """Raise ValueError before any training if the benchmark cannot be evaluated."""
    from flowalign.studies.benchmark.card import load_card
    from flowalign.studies.benchmark.items import read_prompts

    if args.benchmark is None:
        return
    card = load_card(args.benchmark)
    if not card.rewards:
        raise ValueError(
            f"{card.title} is scored by an official tool; compare needs a benchmark with scorers,\n"
            "so train first, then run `flowalign eval --benchmark` with --scores"
        )
    read_prompts(card, args.data)

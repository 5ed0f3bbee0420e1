"""Time the stages of a step against the bare network evaluations: `flowalign bench`."""

import argparse
import json
from pathlib import Path

from flowalign.cli.options import add_config, read_settings, whole
from flowalign.utils.console import table
from flowalign.utils.files import atomic_write

HELP = "Time the stages of a step against the bare network evaluations."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the number of repeats and the output."""
    add_config(parser)
    parser.add_argument("--repeats", type=whole(1), default=3, help="default: 3")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the times as a table and as a line of JSON, and return 0."""
    from flowalign.runs.bench import measure
    from flowalign.runs.config import load

    run_file, _ = load(*read_settings(args))
    result = measure(run_file, args.repeats)
    rows = {name: f"{value:.4g}" for name, value in result.items()}
    if "share_of_peak" not in result:
        rows["share_of_peak"] = "unknown: no peak rate is known of this device or network"
    table(f"one step of {' '.join(args.config)}", rows)
    print(json.dumps(result))  # noqa: T201
    if args.out:
        with atomic_write(Path(args.out)) as partial:
            partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0

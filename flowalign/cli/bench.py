"""Time the stages of a step against the bare network evaluations: `flowalign bench`."""

import argparse
import json

from flowalign.cli.messages import add_config, settings_of
from flowalign.cli.ranges import whole

HELP = "Time the stages of a step against the bare network evaluations."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the number of repeats, and the choice of what to time."""
    add_config(parser)
    parser.add_argument("--repeats", type=whole(1), default=3, help="default: 3")
    parser.add_argument(
        "--values",
        action="store_true",
        help="time the values of all states instead: together, and one after another",
    )


def run(args: argparse.Namespace) -> int:
    """Print the times as a table and as a line of JSON, and return 0."""
    from flowalign.runs.bench import measure
    from flowalign.runs.bench_values import measure_values
    from flowalign.runs.config import load
    from flowalign.utils.console import table
    from flowalign.utils.errors import ConfigError

    run_file, _ = load(*settings_of(args))
    work = measure_values if args.values else measure
    try:
        result = work(run_file, args.repeats)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    table(f"one step of {' '.join(args.config)}", {k: f"{v:.4g}" for k, v in result.items()})
    print(json.dumps(result))  # noqa: T201
    return 0

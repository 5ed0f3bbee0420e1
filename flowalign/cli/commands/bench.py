"""Time the stages of a step, or the values of all states."""

import argparse
import json
from pathlib import Path

from flowalign.cli.commands.common import read_settings
from flowalign.runs.bench.stage_times import measure
from flowalign.runs.bench.values import measure_values
from flowalign.runs.config import load
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.files import atomic_write


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print the times as a table and as a line of JSON, and return 0."""
    run_file, _ = load(*read_settings(args))
    result = (measure_values if args.values else measure)(run_file, args.repeats)
    table(f"one step of {' '.join(args.config)}", {k: f"{v:.4g}" for k, v in result.items()})
    print(json.dumps(result))  # noqa: T201
    if args.out:
        with atomic_write(Path(args.out)) as partial:
            partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0

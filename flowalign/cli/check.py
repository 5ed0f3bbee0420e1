"""`flowalign check`: validate a run file without reading weights, and print its plan."""

import argparse
import sys
from typing import TYPE_CHECKING

from flowalign.cli.messages import add_config, add_processes, settings_of

if TYPE_CHECKING:
    from flowalign.runs.config import Run

HELP = "Validate a run file without reading weights, and print its plan."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb, beside what overrides the run file."""
    add_config(parser)
    add_processes(parser)
    parser.add_argument(
        "--print",
        action="store_true",
        dest="shows_settings",
        help="print the complete settings instead, each with the file that set it",
    )


def run(args: argparse.Namespace) -> int:
    """0 for a run file that can be used; its plan or its settings are printed."""
    from flowalign.runs.config import load_with_origins
    from flowalign.utils.console import table

    loaded = load_with_origins(*settings_of(args))
    if args.shows_settings:
        sys.stdout.write(loaded.annotated())
        return 0
    table(f"plan of {' '.join(args.config)}", planned(loaded.run, args.processes))
    return 0


def planned(run_file: "Run", world: int) -> dict[str, str]:
    """Rows of the plan table. Raises ConfigError for a run that cannot be started."""
    from flowalign.runs.plan import plan
    from flowalign.utils.errors import ConfigError

    try:
        return plan(run_file, world)
    except ValueError as error:
        raise ConfigError(str(error)) from error

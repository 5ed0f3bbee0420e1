"""Validate a run file without reading weights, and print its plan: `flowalign check`."""

import argparse
import sys
from typing import TYPE_CHECKING

from flowalign.cli.messages import add_config, add_processes, settings_of

if TYPE_CHECKING:
    from flowalign.runs.config import Run

HELP = "Validate a run file without reading weights, and print its plan."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the number of processes, and the choice of settings over the plan."""
    add_config(parser)
    add_processes(parser)
    parser.add_argument(
        "--print",
        action="store_true",
        dest="shows_settings",
        help="print the complete settings instead, each with the file that set it",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan or the settings, and return 0; raise ConfigError for an unusable run file."""
    from flowalign.runs.config import load_with_origins
    from flowalign.utils.console import table

    loaded = load_with_origins(*settings_of(args))
    if args.shows_settings:
        sys.stdout.write(loaded.annotated())
        return 0
    table(f"plan of {' '.join(args.config)}", planned(loaded.run, args.processes))
    return 0


def planned(run_file: "Run", world: int) -> dict[str, str]:
    """Return the rows of the plan table; raise ConfigError for a run that cannot start."""
    from flowalign.runs.plan import plan
    from flowalign.utils.errors import ConfigError

    try:
        return plan(run_file, world)
    except ValueError as error:
        raise ConfigError(str(error)) from error

"""`flowalign check`: validate a run file without reading weights, and print its plan."""

import argparse
from typing import TYPE_CHECKING

from flowalign.cli.messages import add_config, add_processes, settings_of

if TYPE_CHECKING:
    from flowalign.runs.config import Run

HELP = "Validate a run file without reading weights, and print its plan."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb, beside what overrides the run file."""
    add_config(parser)
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    """0 for a run file that can be used; its plan is printed."""
    from flowalign.runs.config import load
    from flowalign.utils.console import table

    run_file, _ = load(*settings_of(args))
    table(f"plan of {' '.join(args.config)}", planned(run_file, args.processes))
    return 0


def planned(run_file: "Run", world: int) -> dict[str, str]:
    """Rows of the plan table. Raises ConfigError for a run that cannot be started."""
    from flowalign.runs.plan import plan
    from flowalign.utils.errors import ConfigError

    try:
        return plan(run_file, world)
    except ValueError as error:
        raise ConfigError(str(error)) from error

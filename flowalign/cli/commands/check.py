"""Validate a run file, and print its plan or its complete settings."""

import argparse
import sys

from flowalign.cli.commands.common import read_settings
from flowalign.runs.config import load_with_origins
from flowalign.runs.planning.plan import plan
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print the plan or the settings, and return 0; raise ConfigError for an unusable run file."""
    loaded = load_with_origins(*read_settings(args))
    if args.shows_settings:
        sys.stdout.write(loaded.annotate())
    else:
        settings = loaded.run
        settings.recipe.check_data(settings.context(settings.build_rewards()))
        table(f"plan of {' '.join(args.config)}", plan(settings, args.processes))
    return 0

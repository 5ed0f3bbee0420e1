"""Embed users from their choices, for personalised policies: `flowalign users`."""

import argparse

from flowalign.cli.options import add_config_file

HELP = "Embed users from a few of their choices, for user-conditioned policies (PPD)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file and its overrides."""
    add_config_file(parser)

"""Runs `flowalign users`: embeds people by their choices, for personalised policies."""

import argparse

from flowalign.cli.options import add_config_file

HELP = "Embed users by a few of their choices, for policies that are conditioned on them (PPD)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and its overrides."""
    add_config_file(parser)

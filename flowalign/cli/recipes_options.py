"""List the run files of the package, and copy one: `flowalign recipes`."""

import argparse

HELP = "List the run files of the package with their test labels, or copy one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name, the choice of lists, and the path of a copy."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="name of a run file, or a prefix")
    add("--methods", action="store_true", help="list the methods that fit this model's file")
    add("--memory", action="store_true", help="add the planned memory; takes seconds per file")
    add("--out", metavar="FILE", help="path for a copy of the run file")

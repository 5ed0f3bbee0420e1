"""List the run files of the package, and copy one: `flowalign recipes`."""

import argparse

HELP = "List the run files of the package with what was done with each, or copy one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name, the choice of lists, and the path of a copy."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a listed name, or its beginning")
    add("--methods", action="store_true", help="list the methods that fit behind a model's file")
    add("--memory", action="store_true", help="plan each, which takes a second or more a file")
    add("--out", metavar="FILE", help="copy the run file of this name")

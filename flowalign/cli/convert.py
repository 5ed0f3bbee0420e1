"""Convert run files and run directories of version 0.1: `flowalign convert`."""

import argparse
from pathlib import Path

from flowalign.cli.messages import printer

HELP = "Convert run files and run directories of version 0.1, in place."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the paths to convert."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a run file, or the folder of a run with its checkpoints; each file that changes "
        "stays beside the new one as NAME.0.1.EXTENSION",
    )


def run(args: argparse.Namespace) -> int:
    """Convert the paths, print what was converted, and return 0."""
    from flowalign.runs.convert import convert_path

    log = printer()
    for path in args.paths:
        changed = convert_path(Path(path))
        for file in changed:
            log(f"converted {file}")
        if not changed:
            log(f"{path} is up to date")
    return 0

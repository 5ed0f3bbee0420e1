"""List the run files of the package, and copy one: `flowalign recipes`."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.utils.console import get_log

if TYPE_CHECKING:
    from flowalign.runs.run_files import ShippedRun

HELP = "List the run files of the package with their test labels, or copy one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name, the choice of lists, and the path of a copy."""
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        metavar="NAME",
        help="name of a run file, or a word of it, such as wan or dpo",
    )
    add("--methods", action="store_true", help="list the methods that fit this model's file")
    add("--out", metavar="FILE", help="path for a copy of the run file")


def run(args: argparse.Namespace) -> int:
    """Print the table of run files, or copy one, and return 0."""
    from flowalign.runs.run_files import copy_recipe, find_recipe, search_recipes

    if args.out:
        copy_recipe(find_recipe(args.name or ""), Path(args.out))
        command = shlex.join(["flowalign", "check", args.out])
        get_log()(f"{args.out} is written; the next command is:\n{command}")
        return 0
    if args.methods:
        from flowalign.runs.combinations import combinations

        _print(combinations(find_recipe(args.name or "")))
    else:
        _print(search_recipes(args.name or ""))
    return 0


def _print(listed: "Sequence[ShippedRun]") -> None:
    """Print a line per run file, cut at the width of a terminal unless it is the only one."""
    from rich.console import Console
    from rich.text import Text

    console, width = Console(), max((len(one.name) for one in listed), default=0)
    is_cut = console.is_terminal and len(listed) > 1
    for one in listed:
        papers = [f"arXiv:{paper}" for paper in one.papers]
        line = f"{one.name:{width}}  [{one.label}]  {' '.join([one.about, *papers])}"
        if is_cut:
            console.print(Text(line), no_wrap=True, overflow="ellipsis")
        else:
            console.print(Text(line), soft_wrap=True)
    console.print(f"{len(listed)} run files below configs/", markup=False, highlight=False)

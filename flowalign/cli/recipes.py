"""List the run files of the package, and copy one: `flowalign recipes`."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.utils.console import get_log, table
from flowalign.utils.errors import convert_value_errors

if TYPE_CHECKING:
    from flowalign.runs.run_files import Combination, ShippedFile

HELP = "List the run files of the package with their test labels, or copy one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name, the choice of lists, and the path of a copy."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="name of a run file, or a prefix")
    add("--methods", action="store_true", help="list the methods that fit this model's file")
    add("--memory", action="store_true", help="add the planned memory; takes seconds per file")
    add("--out", metavar="FILE", help="path for a copy of the run file")


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print the table of run files, or copy one, and return 0."""
    from flowalign.runs.run_files import copy_recipe, find_recipe, recipes

    if args.out:
        copy_recipe(find_recipe(args.name or ""), Path(args.out))
        command = shlex.join(["flowalign", "check", args.out])
        get_log()(f"{args.out} is written; the next command is:\n{command}")
        return 0
    if args.methods:
        from flowalign.runs.combinations import combinations

        listed = combinations(find_recipe(args.name or ""))
    else:
        listed = [one for one in recipes() if one.name.startswith(args.name or "")]
        listed = listed or [find_recipe(args.name)]
    rows = {recipe.name: _format_recipe(recipe, args.memory) for recipe in listed}
    table("recipes, below configs/", rows)
    return 0


def _format_recipe(recipe: "ShippedFile | Combination", with_memory: bool) -> str:
    papers = ", ".join(f"arXiv:{paper}" for paper in recipe.papers)
    rows = [f"[{recipe.label}] {recipe.about}", papers]
    if with_memory:
        from flowalign.runs.combinations import memory_of

        rows.append(f"memory {memory_of(recipe)}")
    return "\n".join(row for row in rows if row)

"""List the run files of the package, and copy one: `flowalign recipes`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.messages import printer
from flowalign.utils.errors import ConfigError

if TYPE_CHECKING:
    from flowalign.runs.recipes import Combination, ShippedFile

HELP = "List the run files of the package with what was done with each, or copy one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, what is listed, and where a copy goes."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a listed name, or its beginning")
    add("--methods", action="store_true", help="list the methods that fit behind a model's file")
    add("--memory", action="store_true", help="plan each, which takes a second or more a file")
    add("--out", metavar="FILE", help="copy the run file of this name")


def run(args: argparse.Namespace) -> int:
    """Print the table of run files, or copy one; returns 0.

    Raises:
        ConfigError: There is no such run file, or the copy would replace a file.
    """
    from flowalign.runs.recipes import combinations, copy_recipe, find_recipe, recipes
    from flowalign.utils.console import table

    try:
        if args.out:
            recipe = find_recipe(args.name or "")
            copy_recipe(recipe, Path(args.out))
            printer()(f"{args.out} is written; the next command is:\nflowalign check {args.out}")
            return 0
        if args.methods:
            chosen = combinations(find_recipe(args.name or ""))
        else:
            chosen = [one for one in recipes() if one.name.startswith(args.name or "")]
            chosen = chosen or [find_recipe(args.name)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    table("recipes, below configs/", {one.name: _row(one, args.memory) for one in chosen})
    return 0


def _row(recipe: "ShippedFile | Combination", with_memory: bool) -> str:
    from flowalign.runs.recipes import memory_of

    papers = ", ".join(f"arXiv:{paper}" for paper in recipe.papers)
    rows = [f"[{recipe.label}] {recipe.about}", papers]
    rows += [f"memory {memory_of(recipe)}"] if with_memory else []
    return "\n".join(row for row in rows if row)

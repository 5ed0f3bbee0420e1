"""List the run files of the package with their tests, or copy one."""

import argparse
import shlex
from importlib import import_module
from pathlib import Path

from flowalign.cli.commands.common import get_log
from flowalign.runs.library.run_files import (
    Combination,
    ShippedFile,
    copy_recipe,
    find_recipe,
    recipes,
)
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors

_COMBINATIONS = "flowalign.runs.library.combinations"
"""Module that is imported by name, because it imports torch."""


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print the table of run files, or copy one, and return 0."""
    if args.out:
        copy_recipe(find_recipe(args.name or ""), Path(args.out))
        command = shlex.join(["flowalign", "check", args.out])
        get_log()(f"{args.out} is written; the next command is:\n{command}")
        return 0
    if args.methods:
        listed = import_module(_COMBINATIONS).combinations(find_recipe(args.name or ""))
    else:
        listed = [one for one in recipes() if one.name.startswith(args.name or "")]
        listed = listed or [find_recipe(args.name)]
    rows = {recipe.name: _format_recipe(recipe, args.memory) for recipe in listed}
    table("recipes, below configs/", rows)
    return 0


def _format_recipe(recipe: ShippedFile | Combination, with_memory: bool) -> str:
    papers = ", ".join(f"arXiv:{paper}" for paper in recipe.papers)
    rows = [f"[{recipe.label}] {recipe.about}", papers]
    rows += [f"memory {import_module(_COMBINATIONS).memory_of(recipe)}"] if with_memory else []
    return "\n".join(row for row in rows if row)

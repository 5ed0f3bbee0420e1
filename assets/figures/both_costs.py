"""Train the methods of a study, plot their measure against both costs, and tabulate.

The scripts that compare methods by network evaluations and by reward calls share this module.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from credit import tables
from drawing import draw_curves, draw_seeds
from equal_cost import (
    Study,
    compared,
    finished,
    histories,
    kept,
    options,
    polished,
    results,
    tuned,
)

from flowalign.studies.comparison import compare, methods_of


def made(study: Study, args: argparse.Namespace) -> dict[str, Any]:
    """Run the requested part, and return the numbers of all finished runs."""
    for name in args.only:
        tuned(study, args, name)
        compared(study, args, name)
    runs = finished(study, args.folder)
    guards = {name: [name] for name in study.guards}
    also = {"histories": histories(runs, guards)} if guards else {}
    return results(study, args.folder, runs) | also


def figure(content: dict[str, Any], place: Path) -> None:
    """Draw the measure against both costs, with the range over seeds, and the final diversity."""
    comparison = compare(content["metric"], methods_of(content))
    before = comparison.rows[0].method.runs[0].points[0].diversity
    measured = before is not None and math.isfinite(before)  # not with one image per prompt
    fig, panels = plt.subplots(1, 2 + measured, figsize=(14, 4.6), dpi=100, layout="constrained")
    draw_curves(panels[0], comparison, "network_evaluations")
    draw_curves(panels[1], comparison, "reward_calls")
    if measured:
        diversity = {row.method.name: row.diversity.values for row in comparison.rows}
        draw_seeds(panels[2], diversity, before, "diversity")
    polished(fig, panels)
    fig.savefig(place)


def main(study: Study, description: str) -> None:
    """Run, draw and tabulate."""
    report(study, options(description, study).parse_args())


def report(study: Study, args: argparse.Namespace) -> None:
    """Run, draw and tabulate the requested part."""
    make = (lambda: made(study, args)) if args.folder else None
    content = kept(args.to / f"{study.name}.json", make)
    figure(content, args.to / f"{study.name}.png")
    print(tables(content))  # noqa: T201
    least = {"after training": content["smallest_final"], **content["smallest"]}
    print("smallest difference seen:", json.dumps(least))  # noqa: T201
    for name, runs in content.get("histories", {}).items():
        for guard in study.guards:
            found = [[run["points"][i][guard] for run in runs] for i in (0, -1)]
            before, after = ([f"{value:.3f}" for value in some] for some in found)
            print(f"{name}: {guard} {before[0]} before, {' / '.join(after)} after")  # noqa: T201

"""Train the methods of a study, draw strict against both costs, and tabulate.

Scripts that compare methods by network evaluations and by reward calls share this.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from credit import tables
from equal_cost import (
    Study,
    compared,
    dots,
    finished,
    kept,
    options,
    polished,
    results,
    tuned,
)

from flowalign.reports.comparison import compare, methods_of
from flowalign.reports.comparison_chart import draw


def made(study: Study, args: argparse.Namespace) -> dict[str, Any]:
    """Run the slice that was asked for, and return the numbers of all that is finished."""
    for name in args.only:
        tuned(study, args, name)
        compared(study, args, name)
    return results(args.folder, finished(study, args.folder))


def figure(content: dict[str, Any], place: Path) -> None:
    """Draw strict against both costs, with all seeds between, and the diversity at the end."""
    comparison = compare(content["metric"], methods_of(content))
    fig, panels = plt.subplots(1, 3, figsize=(14, 4.6), dpi=100, layout="constrained")
    draw(panels[0], comparison, "network_evaluations")
    draw(panels[1], comparison, "reward_calls")
    diversity = {row.method.name: row.diversity.values for row in comparison.rows}
    dots(panels[2], diversity, comparison.rows[0].method.runs[0].points[0].diversity, "diversity")
    polished(fig, panels)
    fig.savefig(place)


def main(study: Study, description: str) -> None:
    """Run, draw and tabulate."""
    args = options(description, study).parse_args()
    make = (lambda: made(study, args)) if args.folder else None
    content = kept(args.to / f"{study.name}.json", make)
    figure(content, args.to / f"{study.name}.png")
    print(tables(content))  # noqa: T201
    least = {"after training": content["smallest_final"], **content["smallest"]}
    print("smallest difference seen:", json.dumps(least))  # noqa: T201

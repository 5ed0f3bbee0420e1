"""Compare methods of several families at equal cost on the embedded model, and draw it.

    python assets/figures/families.py runs/families                           # goes on
    python assets/figures/families.py runs/families --only nft --seeds 0      # a slice of it

How methods are tuned and trained is in `equal_cost.py`. Writes `compare.*` of all runs that are
finished into the folder, `families.json` and `families.png` beside this script, or into --to, and
prints the table. Without a folder it draws what is there.
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

GROUPS = "configs/tasks/shapes_groups.yaml"
STUDY = Study(
    name="families",
    methods={
        "flow_grpo": ["configs/shapes.yaml"],
        "tempflow_grpo": ["configs/shapes_tempflow.yaml"],
        "online_dpo": ["configs/preference/shapes/online_dpo.yaml"],
        "nft": ["configs/shapes_nft.yaml"],
        "awm": ["configs/shapes.yaml", "configs/methods/awm.yaml", GROUPS],
        "dgpo": ["configs/shapes.yaml", "configs/methods/dgpo.yaml", GROUPS],
        "crd": ["configs/shapes.yaml", "configs/methods/crd.yaml", GROUPS],
        "nft_step_credit": ["configs/shapes_nft.yaml", "configs/methods/nft_step_credit.yaml"],
    },
    budget=52_800,
    rates=(1e-3, 2e-3),
)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Run the slice that was asked for, and return the numbers of all that is finished."""
    for name in args.only:
        tuned(STUDY, args, name)
        compared(STUDY, args, name)
    return results(args.folder, finished(STUDY, args.folder))


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


def main() -> None:
    """Run, draw and tabulate."""
    args = options(__doc__.splitlines()[0], STUDY).parse_args()
    content = kept(args.to / "families.json", (lambda: study(args)) if args.folder else None)
    figure(content, args.to / "families.png")
    print(tables(content))  # noqa: T201
    least = {"after training": content["smallest_final"], **content["smallest"]}
    print("smallest difference seen:", json.dumps(least))  # noqa: T201


if __name__ == "__main__":
    main()

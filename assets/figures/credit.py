"""Store a finished comparison as the figures of the README: JSON, PNG and tables.

    flowalign compare ... --out runs/credit     # the command in docs/results/credit_study.md
    python assets/figures/credit.py runs/credit

Writes `credit.json`, `credit.png` and `credit.html` next to this script and prints the table.
Without a folder it draws the stored numbers.
"""

import json
import shutil
import sys
from pathlib import Path

from drawing import draw_curves

from flowalign.studies.comparison import compare, methods_of

HERE = Path(__file__).parent
AXES = {"reward_calls": "reward calls", "network_evaluations": "evaluations", "seconds": "seconds"}


def spread(cell: dict) -> str:
    """Format mean and standard deviation; only the mean for one seed, a dash without values."""
    if cell["mean"] is None:
        return "-"
    return f"{cell['mean']:.3f}" + (f" ± {cell['std']:.3f}" if cell["std"] is not None else "")


def tables(comparison: dict) -> str:
    """Tabulate the final results of each method, and its results at the budget that all reached."""
    budgets = comparison["budgets"]
    at = " | ".join(f"at {budgets[axis]:,.0f} {name}" for axis, name in AXES.items())
    lines = [
        f"| method | final {comparison['metric']} | each seed | diversity | {at} "
        "| seconds, calls, evaluations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in comparison["rows"]:
        seeds = " / ".join(f"{value:.3f}" for value in row["final"]["values"])
        cells = [spread(row["at_budget"][axis]) for axis in AXES]
        costs = row["costs"]
        spent = f"{costs['seconds']:,.0f}, {costs['reward_calls']:,.0f}, "
        spent += f"{costs['network_evaluations']:,.0f}"
        lines.append(
            f"| {row['method']['name']} | {spread(row['final'])} | {seeds} | "
            f"{spread(row['diversity'])} | {' | '.join(cells)} | {spent} |"
        )
    return "\n".join(lines)


def figure(content: dict) -> None:
    """Draw the learning curves against three costs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from equal_cost import polished

    comparison = compare(content["metric"], methods_of(content))
    fig, panels = plt.subplots(1, 3, figsize=(14, 5.2), dpi=100, layout="constrained", sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        draw_curves(panel, comparison, axis)
        panel.set_title(f"equal {axis.replace('_', ' ')}")
    for panel in panels[1:]:
        panel.set_ylabel("")
    polished(fig, panels)
    fig.savefig(HERE / "credit.png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for kind in ("json", "html"):
            shutil.copy(Path(sys.argv[1]) / f"compare.{kind}", HERE / f"credit.{kind}")
    content = json.loads((HERE / "credit.json").read_text())
    figure(content)
    print(tables(content))  # noqa: T201

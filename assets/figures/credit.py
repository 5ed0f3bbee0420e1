"""Store a finished comparison as the figures of the README: JSON, PNG and tables.

    flowalign compare ... --out runs/credit     # the command in docs/results/credit_study.md
    python assets/figures/credit.py runs/credit

Writes `credit.json`, `credit.png` and `credit.html` next to this script and prints the table.
"""

import json
import shutil
import sys
from pathlib import Path

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


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for kind in ("json", "png", "html"):
        shutil.copy(folder / f"compare.{kind}", HERE / f"credit.{kind}")
    print(tables(json.loads((folder / "compare.json").read_text())))  # noqa: T201

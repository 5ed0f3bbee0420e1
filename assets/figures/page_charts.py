"""Draw charts of the numbers in the tables of result pages.

    python assets/figures/page_charts.py                # all of them
    python assets/figures/page_charts.py few_steps      # one page

A chart reads the table of its page, so that both show the same numbers. Writes `<page>.png` next to
this script. Whiskers are the 95 % interval, where the table has one.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawing import BLACK, BLUE, GREEN, ORANGE
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PAGES = HERE.parent.parent / "docs" / "results"
COLOURS = (BLUE, ORANGE, GREEN)


@dataclass(frozen=True)
class Chart:
    """A chart of columns of a table. The table is the first with `first` as its first header."""

    first: str
    """Header of the column that holds the labels."""
    values: tuple[str, ...]
    """Headers of the columns to draw."""
    label: str
    """Label of the horizontal axis."""
    interval: str | None = None
    """Header of the column with the interval, such as "86 to 92 %"."""
    chance: float | None = None
    """Value of a guess, which is drawn as a dashed line."""


CHARTS = {
    "few_steps": Chart("sampler", ("accuracy",), "held-out accuracy, %"),
    "forward_process": Chart("method", ("gain, points",), "gain in held-out accuracy, points"),
    "learned_reward": Chart(
        "dimension", ("pair accuracy",), "pairs ordered like the verifier, %", "95 % interval", 50.0
    ),
    "teachers": Chart("policy", ("position", "count", "accuracy"), "held-out prompts, %"),
}


def read_table(text: str, first: str) -> list[dict[str, str]]:
    """Return the rows of the first Markdown table with `first` as its first header."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def draw(chart: Chart, rows: list[dict[str, str]]) -> Any:
    """Return a figure with one row per label and one bar per column."""
    height = 0.8 / len(chart.values)
    size = 1.0 + 0.34 * len(rows) * (1 + 0.5 * (len(chart.values) - 1))
    fig = Figure(figsize=(8, size), dpi=110, layout="constrained")
    axes = fig.subplots()
    for k, header in enumerate(chart.values):
        places = [i - 0.4 + height * (k + 0.5) for i in range(len(rows))]
        values = [_numbers(row[header])[0] for row in rows]
        bars = axes.barh(places, values, height, color=COLOURS[k], label=header)
        padding = 24 if chart.interval else 4  # room for the whiskers
        axes.bar_label(bars, [row[header] for row in rows], padding=padding, fontsize=9)
        if chart.interval:
            for place, row in zip(places, rows, strict=True):
                low, high = _numbers(row[chart.interval])
                axes.plot([low, high], [place, place], color=BLACK, lw=1.2)
    axes.set_yticks(range(len(rows)), [_plain(row[chart.first]) for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel=chart.label, xlim=(0, axes.get_xlim()[1] * 1.08))
    if chart.chance is not None:
        axes.axvline(chart.chance, color="#888888", lw=1, ls="--")
    if len(chart.values) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return fig


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def _plain(cell: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).replace("`", "")


def main() -> None:
    """Draw the charts that are named on the command line, or all."""
    for page in sys.argv[1:] or CHARTS:
        rows = read_table((PAGES / f"{page}.md").read_text(), CHARTS[page].first)
        draw(CHARTS[page], rows).savefig(HERE / f"{page}.png")


if __name__ == "__main__":
    main()

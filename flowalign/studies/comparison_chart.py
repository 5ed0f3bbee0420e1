"""Draw the learning curves of a comparison along its costs."""

import io
from collections.abc import Sequence
from typing import Any

from flowalign.reports.pages import INK, Chart, Line
from flowalign.studies.comparison import DISTANCE, Axis, Comparison
from flowalign.utils.imports import import_optional

DRAWN: tuple[Axis, ...] = ("reward_calls", "network_evaluations", "seconds")
COLOURS = (
    "#1c1c1c",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#b8860b",
    "#882255",
    "#808080",
)
"""Palette of Okabe and Ito, safe for colour-blind readers, with a darker yellow. The baseline is
black."""
DASHES = ((), (5.0, 1.6), (1.2, 1.2), (6.0, 1.4, 1.2, 1.4))
"""Lengths of dashes and gaps, in line widths."""
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.labelcolor": "#444444",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
_CUT = 3.0
"""Multiple of the common budget at which horizontal axes end, as further values cannot be
compared."""


def spent_by_all(comparison: Comparison, axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes with costs in every run; stored pairs call no reward, for example.

    If no run has continued past its first evaluation, all axes are returned.
    """
    return [axis for axis in axes if comparison.budgets[axis] > 0] or list(axes)


def list_charts(comparison: Comparison) -> list[Chart]:
    """Return the curves along all costs, and along the distance if it was measured."""
    axes = spent_by_all(comparison, DRAWN)
    if comparison.distance:
        axes.append(DISTANCE)
    return [chart(comparison, axis) for axis in axes]


def chart(comparison: Comparison, axis: Axis) -> Chart:
    """Return the learning curves along one axis: means, and bands from lowest to highest seed.

    The vertical line is the budget that all runs reached.
    """
    lines, y_label = [], f"held-out {comparison.metric}"
    for i, row in enumerate(comparison.rows):
        band, several = row.bands[axis], len(row.method.runs) > 1
        # Neighbours differ in colour and dashes, 36 methods in one of them.
        colour, place = COLOURS[i % len(COLOURS)], (i + i // len(COLOURS)) % len(DASHES)
        lines.append(
            Line(
                row.method.name,
                band.cost,
                band.mean,
                INK if colour == COLOURS[0] else colour,  # black is invisible on a dark page
                low=band.low if several else (),
                high=band.high if several else (),
                dash=[2 * length for length in DASHES[place]],
                width=2.2 if i == 0 else 1.7,
            )
        )
    if axis == DISTANCE:
        return Chart("Equal distance", f"{words(comparison.distance)} to base", y_label, lines)
    name, budget = words(axis), comparison.budgets[axis]
    ends = (0.0, _CUT * budget) if is_cut(comparison, axis) else None
    return Chart(f"Equal {name}", name, y_label, lines, x_range=ends, x_marks=[budget])


def picture(comparison: Comparison) -> bytes:
    """Return a PNG of all learning curves, with the legend below."""
    matplotlib = import_optional("matplotlib", "plots")
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13.5, 5), layout="constrained", dpi=150)
        shown = list_charts(comparison)
        for i, one in enumerate(shown):
            draw(figure.add_subplot(1, len(shown), i + 1), one)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(len(labels), 5),
            frameon=False,
            handlelength=3.5,
            fontsize=12,
        )
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    return drawn.getvalue()


def draw(axes: Any, chart: Chart) -> None:
    """Draw the lines, bands and marks of a chart."""
    from matplotlib.ticker import MaxNLocator

    for line in chart.lines:
        colour = COLOURS[0] if line.colour == INK else line.colour
        if len(line.low):
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.10, linewidth=0)
        axes.plot(
            line.x,
            line.y,
            label=line.label,
            color=colour,
            linestyle=(0, [length / 2 for length in line.dash]) if line.dash else "-",
            linewidth=line.width,
            marker="o" if len(line.x) < 3 else None,
            markersize=4,
        )
    for mark in chart.x_marks:
        axes.axvline(mark, color="#888888", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    axes.set_xlim(left=0, right=chart.x_range[1] if chart.x_range else None)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    axes.set_title(chart.title, fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")


def is_cut(comparison: Comparison, axis: Axis) -> bool:
    """Return whether curves continue beyond the end of an axis."""
    return max(r.bands[axis].cost[-1] for r in comparison.rows) > _CUT * comparison.budgets[axis]


def words(name: str) -> str:
    """Format a name for display, without underscores."""
    return name.replace("_", " ")


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"

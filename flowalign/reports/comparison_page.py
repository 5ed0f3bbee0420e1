"""Write a comparison to read, to show and to reuse: `compare.html`, `.png` and `.json`."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from flowalign.reports.charts import Drawing, data_address, framed, style
from flowalign.reports.comparison import AXES, Axis, Band, Comparison, Row, SeedStatistics, leads
from flowalign.reports.hover import hover
from flowalign.reports.pages import render
from flowalign.reports.run_report import COMPARISON_LINK, write_report
from flowalign.utils.files import atomic_write, write_text

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
"""Colours of Okabe and Ito, told apart without red or green, the yellow darkened; the baseline is
black."""
DASHES = ((), (5.0, 1.6), (1.2, 1.2), (6.0, 1.4, 1.2, 1.4))
"""Lengths of dashes and gaps, in line widths."""
_CREDIT_WIDTH = 900
"""Width in pixels to which credit charts are reduced."""
_CUT = 3.0
"""Multiple of the common budget at which horizontal axes end; beyond, there is nothing to
compare."""


def write_comparison(out: Path, comparison: Comparison, missing: Sequence[str] = ()) -> None:
    """Write the three files, each atomically; `missing` names runs that failed."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"missing": list(missing)} | asdict(comparison)
    write_text(out / "compare.json", json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")
    drawn = picture(comparison)
    with atomic_write(out / "compare.png") as partial:
        partial.write_bytes(drawn)
    credit_charts, links = credit_pictures(out, comparison), reports_of_runs(out, comparison)
    name = out.resolve().name
    write_text(out / "compare.html", page(name, comparison, missing, credit_charts, links))
    for link in links.values():  # runs that ended before there was a comparison to link
        if COMPARISON_LINK not in (out / link).read_text(encoding="utf-8"):
            write_report((out / link).parent)


def reports_of_runs(out: Path, comparison: Comparison) -> dict[tuple[str, int], str]:
    """Return the addresses of the runs' reports from the comparison's page, by method and seed."""
    runs = [(row.method.name, run.seed) for row in comparison.rows for run in row.method.runs]
    links = {(name, seed): f"{name}/seed{seed}/report.html" for name, seed in runs}
    return {run: link for run, link in links.items() if (out / link).is_file()}


def page(
    name: str,
    comparison: Comparison,
    missing: Sequence[str] = (),
    credit_charts: Sequence[tuple[str, str]] = (),
    links: Mapping[tuple[str, int], str] | None = None,
) -> str:
    """Render the self-contained page.

    `credit_charts` are methods with the URLs of their charts, `links` the addresses of reports.
    """
    compared, drawn = spent_by_all(comparison, AXES), spent_by_all(comparison, DRAWN)
    won = {axis: leads(comparison, axis) for axis in compared}
    return render(
        "comparison.html.j2",
        {"score": score, "spread": with_std, "count": count, "words": words},
        name=name,
        comparison=comparison,
        rows=comparison.rows,
        axes=AXES,
        compared=compared,
        won=won,
        baseline=comparison.rows[0].method.name,
        baseline_final=comparison.rows[0].final.mean,
        verdict=verdict(comparison),
        caution=caution(comparison),
        missing=missing,
        cut=[words(axis) for axis in drawn if _is_cut(comparison, axis)],
        charts=[(axis, chart(comparison, axis)) for axis in drawn],
        looks=[swatch(i) for i in range(len(comparison.rows))],
        diverse=any(math.isfinite(row.diversity.mean) for row in comparison.rows),
        reached=reached,
        each_seed=each_seed,
        credit_charts=credit_charts,
        links=links or {},
        seeds=sorted({run.seed for row in comparison.rows for run in row.method.runs}),
    )


def spent_by_all(comparison: Comparison, axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes along which every run had costs; stored pairs call no reward, for example.

    All axes are returned where no run has gone beyond its first evaluation.
    """
    return [axis for axis in axes if comparison.budgets[axis] > 0] or list(axes)


def credit_pictures(out: Path, comparison: Comparison) -> list[tuple[str, str]]:
    """Return the last credit chart of each method's first run, where the method credits steps."""
    found = []
    for row in comparison.rows:
        run = min(run.seed for run in row.method.runs)
        pictures = sorted((out / row.method.name / f"seed{run}" / "credit").glob("step-*.png"))
        if pictures:
            content = io.BytesIO()
            with Image.open(pictures[-1]) as picture:
                reduced = picture.convert("RGB")
                reduced.thumbnail((_CREDIT_WIDTH, 4 * _CREDIT_WIDTH))
                reduced.save(content, "JPEG", quality=80)
            found.append((row.method.name, data_address("jpeg", content.getvalue())))
    return found


def verdict(comparison: Comparison) -> str:
    """State which method ended highest, and which leads where all have spent as much."""
    rows, axis = comparison.rows, spent_by_all(comparison, AXES)[0]
    highest = max(row.final.mean for row in rows)
    best = [row for row in rows if row.final.mean == highest]
    led = [row for row, leader in zip(rows, leads(comparison, axis), strict=True) if leader]
    end = f"{_names(best, 'end')} highest in held-out {comparison.metric}: "
    end += with_std(best[0].final)
    if rows[0] not in best:
        end += f" (baseline {rows[0].method.name}: {with_std(rows[0].final)})"
    return (
        f"{end}. At {count(comparison.budgets[axis])} {words(axis)}, which all runs made, "
        f"{_names(led, 'lead')} with {with_std(led[0].at_budget[axis])}."
    )


def _names(rows: Sequence[Row], verb: str) -> str:
    """Join the names of methods and a verb, for a sentence."""
    return " and ".join(row.method.name for row in rows) + f" {verb}{'s' * (len(rows) == 1)}"


def caution(comparison: Comparison) -> str:
    """State what too few seeds do not support; empty if all methods have several."""
    single = [row.method.name for row in comparison.rows if len(row.method.runs) == 1]
    if not single:
        return ""
    if len(single) == len(comparison.rows):
        return "Every method has one seed only: this supports no claim about which one is better."
    return f"One seed only, which supports no claim: {', '.join(single)}."


def chart(comparison: Comparison, axis: Axis) -> Drawing:
    """Draw the learning curves along one axis, without a legend."""
    address, frame = framed(lambda axes: draw(axes, comparison, axis), (350, 270))
    lines = {row.method.name: row.bands[axis] for row in comparison.rows}
    values = {name: (band.cost, band.mean) for name, band in lines.items()}
    return Drawing(address, hover(frame, words(axis), values))


def picture(comparison: Comparison) -> bytes:
    """Draw all learning curves in one PNG, the legend below."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style()):
        figure = Figure(figsize=(13.5, 5), layout="constrained", dpi=150)
        shown = spent_by_all(comparison, DRAWN)
        for i, axis in enumerate(shown):
            axes = figure.add_subplot(1, len(shown), i + 1)
            draw(axes, comparison, axis)
            axes.set_title(f"equal {words(axis)}", fontsize=12)
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


def draw(axes: Any, comparison: Comparison, axis: Axis) -> None:
    """Draw mean lines, bands from lowest to highest seed, and the budget that all reached."""
    from matplotlib.ticker import MaxNLocator

    for i, row in enumerate(comparison.rows):
        _line(axes, row.method.name, row.bands[axis], i, len(row.method.runs) > 1)
    budget = comparison.budgets[axis]
    axes.axvline(budget, color="#888888", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    axes.set_xlim(left=0, right=_CUT * budget if _is_cut(comparison, axis) else None)
    axes.set(xlabel=words(axis), ylabel=f"held-out {comparison.metric}")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")


def _line(axes: Any, label: str, band: Band, i: int, banded: bool) -> None:
    colour, dashes = look(i)
    if banded:
        axes.fill_between(band.cost, band.low, band.high, color=colour, alpha=0.10, linewidth=0)
    axes.plot(
        band.cost,
        band.mean,
        label=label,
        color=colour,
        linestyle=(0, dashes) if dashes else "-",
        linewidth=2.2 if i == 0 else 1.7,
        marker="o" if len(band.cost) < 3 else None,
        markersize=4,
    )


def look(i: int) -> tuple[str, tuple[float, ...]]:
    """Return colour and dashes of the i-th method; neighbours differ in both, 36 differ in one."""
    return COLOURS[i % len(COLOURS)], DASHES[(i + i // len(COLOURS)) % len(DASHES)]


def swatch(i: int) -> dict[str, str]:
    """Return the line of the i-th method as attributes of an SVG line 2.5 units wide."""
    colour, dashes = look(i)
    return {"stroke": colour, "dashes": " ".join(f"{2.5 * length:g}" for length in dashes)}


def _is_cut(comparison: Comparison, axis: Axis) -> bool:
    return max(r.bands[axis].cost[-1] for r in comparison.rows) > _CUT * comparison.budgets[axis]


def reached(row: Row, axis: Axis) -> str:
    """Format the cost at which a method met the baseline's final mean, with its relative cost."""
    met = row.reach[axis]
    if not math.isfinite(met.cost):
        return "not reached"
    return count(met.cost) + (f" ({met.share:.0%})" if math.isfinite(met.share) else "")


def each_seed(row: Row, seeds: Sequence[int]) -> list[str]:
    """Format the final value of every seed; a dash for a run that is missing."""
    found = {run.seed: run.last.value for run in row.method.runs}
    return [score(found.get(seed, math.nan)) for seed in seeds]


def words(name: str) -> str:
    """Format a name for people, without underscores."""
    return name.replace("_", " ")


def score(value: float) -> str:
    """Format three decimals; a dash for what was not measured."""
    return f"{value:.3f}" if math.isfinite(value) else "-"


def with_std(values: SeedStatistics) -> str:
    """Format mean and standard deviation, or the mean alone for one seed."""
    return score(values.mean) + (f" ± {score(values.std)}" if math.isfinite(values.std) else "")


def count(value: float) -> str:
    """Format a cost as a whole number, or with one decimal for a few seconds."""
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:,.1f}"


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _finite(content: Any) -> Any:
    """Replace numbers that are not finite by None, as JSON has no NaN."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content

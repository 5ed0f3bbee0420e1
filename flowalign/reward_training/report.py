"""Renders `eval.html`: one self-contained page about how well scores agree with people."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from flowalign.reports.charts import drawn

Content = dict[str, Any]
"""Content of `eval.json`."""
_CURVES = 4
"""Largest number of dimensions in a calibration chart; more cannot be told apart."""
_FEWEST = 10
"""Smallest number of pairs in a bin that is drawn; the share of fewer is too noisy."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#882255")
_MARKERS = ("o", "s", "^", "D")
_OPEN = 3
"""Number of human columns that are unfolded when the page is opened."""


def page(name: str, content: Content, measures: Mapping[str, str]) -> str:
    """Render the page; `measures` maps the names of measures to labels, in the order of columns."""
    template = Path(__file__).with_name("report_template.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"score": score, "interval": interval}
    sections = by_human_column(content)
    dims = list(dict.fromkeys(result["score"] for result in content["results"]))
    return environment.from_string(template).render(
        name=name,
        content=content,
        measures=measures,
        verdict=verdict(sections),
        sections=[
            (column, rows, accuracy_chart(rows), calibration_chart(rows, dims), i < _OPEN)
            for i, (column, rows) in enumerate(sections.items())
        ],
        cautions=cautions(content),
        swaps=[swap for swap in content["swaps"] if swap["n"]],
        finite=math.isfinite,
    )


def by_human_column(content: Content) -> dict[str, list[Content]]:
    """Group results by human column, the highest accuracy first."""
    sections: dict[str, list[Content]] = {}
    for result in content["results"]:
        sections.setdefault(result["human"], []).append(result)
    return {column: sorted(rows, key=_accuracy, reverse=True) for column, rows in sections.items()}


def verdict(sections: Mapping[str, Sequence[Content]]) -> str:
    """Say in a sentence which dimension agrees best with the first human column."""
    column, rows = next(iter(sections.items()))
    found = rows[0]["measures"]["accuracy_without_ties"]
    if not found["n"]:
        return f"People decided on no pair in {column} that has two valid scores."
    lead = "" if len(rows) == 1 else f"Of {len(rows)} scored dimensions "
    verb = "agrees" if len(rows) == 1 else "agrees best"
    return (
        f"{lead}{rows[0]['score']} {verb} with {column}: the order is right in "
        f"{100 * found['value']:.1f} % of {found['n']:,} pairs on which people decided"
        + (f" (95 % interval {interval(found, 100.0, 1)})" if math.isfinite(found["low"]) else "")
        + "."
    )


def cautions(content: Content) -> list[str]:
    """List what a reader must know before quoting the figures."""
    warnings = []
    if content["prompts"] < 30:
        warnings.append(
            f"There are only {content['prompts']} prompts: intervals from so few are too narrow."
        )
    if len(content["fingerprints"]) > 1:
        warnings.append(f"Scores of {len(content['fingerprints'])} different versions are mixed.")
    lost = [r for r in content["results"] if r["unscored"]]
    if lost:
        worst = max(lost, key=lambda r: r["unscored"])
        warnings.append(
            f"Pairs without two valid scores are left out, at most {worst['unscored']:,} "
            f"({worst['score']} in {worst['human']})."
        )
    return warnings


def accuracy_chart(rows: Sequence[Content]) -> str:
    """Draw accuracy without ties and its interval, a line per dimension, as an SVG data address."""
    shown = [row for row in rows if row["measures"]["accuracy_without_ties"]["n"]][::-1]

    def draw(axes: Any) -> None:
        for height, row in enumerate(shown):
            found = row["measures"]["accuracy_without_ties"]
            axes.plot(
                [100 * found["low"], 100 * found["high"]],
                [height, height],
                color="#0072b2",
                linewidth=4,
                alpha=0.35,
                solid_capstyle="butt",
            )
            axes.plot(100 * found["value"], height, "o", color="#0072b2", markersize=6)
        axes.axvline(50, color="#888888", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        axes.set_yticks(range(len(shown)), [_short(row["score"]) for row in shown])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("accuracy without ties, % (dotted: chance)")

    return drawn(draw, (350, 90 + 20 * len(shown))) if shown else ""


def calibration_chart(rows: Sequence[Content], dims: Sequence[str]) -> str:
    """Draw how often the favourite won over how probable it was, for the most accurate dimensions.

    The index of a dimension in `dims` decides its colour and mark.
    """
    curves = [(row["score"], [b for b in row["reliability"] if b["n"] >= _FEWEST]) for row in rows]
    shown = [(dim, bins) for dim, bins in curves if bins][:_CURVES]

    def draw(axes: Any) -> None:
        axes.plot([0.5, 1], [0.5, 1], color="#888888", linewidth=0.9, linestyle=(0, (2, 2)))
        for dim, bins in shown:
            x, y = [b["confidence"] for b in bins], [b["accuracy"] for b in bins]
            sizes = [8 + 52 * b["n"] / max(b["n"] for b in bins) for b in bins]
            colour = _COLOURS[dims.index(dim) % len(_COLOURS)]
            marker = _MARKERS[dims.index(dim) % len(_MARKERS)]
            axes.plot(x, y, color=colour, alpha=0.5)
            axes.scatter(x, y, sizes, color=colour, marker=marker, label=_short(dim), zorder=3)
        axes.set_xlim(0.48, 1.02)
        axes.set(xlabel="probability of the favourite", ylabel="share that it won")
        legend = axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=2,
            frameon=False,
            handletextpad=0.2,
        )
        for handle in legend.legend_handles:
            handle.set_sizes([30])

    return drawn(draw, (350, 270)) if shown else ""


def score(value: float) -> str:
    """Format a score with three decimals; a dash if it is not finite."""
    return f"{value:.3f}" if math.isfinite(value) else "-"


def interval(measure: Mapping[str, Any], scale: float = 1.0, digits: int = 3) -> str:
    """Format the interval of a measure, from its low to its high end."""
    return f"{scale * measure['low']:.{digits}f} to {scale * measure['high']:.{digits}f}"


def finite(content: Any) -> Any:
    """Replace numbers that are not finite by null, since JSON has none."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _accuracy(result: Content) -> float:
    value = result["measures"]["accuracy_without_ties"]["value"]
    return value if math.isfinite(value) else -1.0


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"

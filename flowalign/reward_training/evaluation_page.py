"""Render `eval.html`, the agreement of scores with annotators, and the card of a reward."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.reports.pages import PALETTE, Chart, Line, fit_scale, render, score

Content = dict[str, Any]
"""Content of `eval.json`."""
_CURVES = 4
"""Largest number of curves in a calibration chart; more could not be distinguished."""
_FEWEST = 10
"""Smallest number of pairs in a bin that is drawn; smaller bins are too noisy."""
_OPEN = 3
"""Number of human columns that are unfolded when the page is opened."""


def page(name: str, content: Content, measures: Mapping[str, str]) -> str:
    """Render the page; `measures` maps the names of measures to labels, in the order of columns."""
    sections = by_human_column(content)
    dims = list(dict.fromkeys(result["score"] for result in content["results"]))
    return render(
        "reward_eval.html.j2",
        {"score": score, "interval": interval},
        name=name,
        content=content,
        measures=measures,
        verdict=verdict(sections),
        sections=[
            (column, rows, list_accuracies(rows), calibration_chart(rows, dims), i < _OPEN)
            for i, (column, rows) in enumerate(sections.items())
        ],
        cautions=cautions(content),
        finite=math.isfinite,
    )


def by_human_column(content: Content) -> dict[str, list[Content]]:
    """Return results grouped by human column, the highest accuracy first."""
    sections: dict[str, list[Content]] = {}
    for result in content["results"]:
        sections.setdefault(result["human"], []).append(result)
    return {column: sorted(rows, key=_accuracy, reverse=True) for column, rows in sections.items()}


def verdict(sections: Mapping[str, Sequence[Content]]) -> str:
    """Return a sentence on the dimension that agrees best with the first human column."""
    column, rows = next(iter(sections.items()))
    found = rows[0]["measures"]["accuracy_score_ties_half"]
    if not found["n"]:
        return f"{column} has no pair with a human preference and two valid scores."
    lead = "" if len(rows) == 1 else f"Of {len(rows)} scored dimensions "
    verb = "agrees" if len(rows) == 1 else "agrees best"
    return (
        f"{lead}{rows[0]['score']} {verb} with {column}: the order is right in "
        f"{100 * found['value']:.1f} % of {found['n']:,} pairs with a human preference"
        + (f" (95 % interval {interval(found, 100.0, 1)})" if math.isfinite(found["low"]) else "")
        + (f"; {ties:,} equal scores count half" if (ties := rows[0]["score_ties"]) else "")
        + "."
        + (" This is not above chance." if found["low"] <= 0.5 or found["value"] <= 0.5 else "")
        + (
            f" Two annotators agree in {100 * share:.1f} % of the cases, the ceiling of agreement "
            "with one annotator."
            if math.isfinite(share := rows[0]["annotators_agree"])
            else ""
        )
    )


def cautions(content: Content) -> list[str]:
    """Return warnings that limit the conclusions from the results."""
    warnings = []
    if content["prompts"] < 30:
        warnings.append(f"With only {content['prompts']} prompts, the intervals are too narrow.")
    if len(content["fingerprints"]) > 1:
        warnings.append(f"Scores of {len(content['fingerprints'])} different versions are mixed.")
    worst = max(content["results"], key=lambda r: r["unscored"])
    if worst["unscored"]:
        warnings.append(
            f"Pairs without two valid scores are left out, at most {worst['unscored']:,} "
            f"({worst['score']} in {worst['human']})."
        )
    return warnings


def list_accuracies(rows: Sequence[Content]) -> list[Content]:
    """Return the accuracy of the headline and its interval in percent, one row per dimension."""
    bars = []
    for row in rows:
        measure = row["measures"]["accuracy_score_ties_half"]
        if measure["n"]:
            value = 100 * measure["value"]
            ends = [100 * measure[end] for end in ("low", "high")]
            low, high = ends if all(map(math.isfinite, ends)) else (value, value)
            bars.append({"name": row["score"], "value": value, "low": low, "high": high})
    scale = fit_scale([(bar["low"], bar["high"]) for bar in bars], mark=50.0)
    return [bar | {"scale": scale} for bar in bars]


def calibration_chart(rows: Sequence[Content], dims: Sequence[str]) -> Chart | None:
    """Return the chart of the favourite's share of wins against its predicted probability.

    It shows the most accurate dimensions. The index of a dimension in `dims` decides its colour.
    """
    curves = [(row["score"], [b for b in row["reliability"] if b["n"] >= _FEWEST]) for row in rows]
    shown = [(dim, bins) for dim, bins in curves if bins][:_CURVES]
    if not shown:
        return None
    lines = [Line("calibrated", [0.5, 1.0], [0.5, 1.0], "#888888", dash=(3, 3), faint=True)]
    for dim, bins in shown:
        share = [b["accuracy"] for b in bins]
        errors = [math.sqrt(b["accuracy"] * (1 - b["accuracy"]) / b["n"]) for b in bins]
        lines.append(
            Line(
                dim,
                [b["confidence"] for b in bins],
                share,
                PALETTE[dims.index(dim) % len(PALETTE)],
                low=[s - e for s, e in zip(share, errors, strict=True)],
                high=[s + e for s, e in zip(share, errors, strict=True)],
            )
        )
    return Chart("Calibration", "probability of the favourite", "share that it won", lines)


def interval(measure: Mapping[str, Any], scale: float = 1.0, digits: int = 3) -> str:
    """Format the interval of a measure, from its low to its high end."""
    return f"{scale * measure['low']:.{digits}f} to {scale * measure['high']:.{digits}f}"


def _accuracy(result: Content) -> float:
    value = result["measures"]["accuracy_score_ties_half"]["value"]
    return value if math.isfinite(value) else -1.0


def render_card(config: Mapping[str, Any]) -> str:
    """Return the card: dimensions, data, agreement with annotators, calibration, licence, use."""
    optional = {"noise": None, "needs_references": False}
    filters = {"shown": _format_value, "json": json.dumps}
    return render("reward_card.md.j2", filters, **optional | dict(config)) + "\n"


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_format_value(v) for v in value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

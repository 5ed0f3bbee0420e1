"""Render the page of a probe."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.reports.pages import PALETTE, Chart, Line, fit_scale, render

ERRORS = 2
"""Standard errors to each side of an interval with about 95 % coverage."""
_COSTS = {
    "network_evaluations": "1000 evaluations",
    "reward_calls": "1000 reward calls",
    "decodes": "1000 decodes",
    "seconds": "minute",
}
BEST, OWN = "best weights", "run file's weights"


def page(name: str, probe: Mapping[str, Any]) -> str:
    """Render the self-contained page of the results in `probe.json`."""
    metric = probe["metric"]
    by_name = {setting["name"]: setting for setting in probe["settings"]}
    ranked = [by_name[row["name"]] | {"rank": row} for row in probe["ranking"]]
    return render(
        "probe.html.j2",
        {"figure": figure, "spread": spread, "weights": weights},
        name=name,
        metric=metric,
        other="update" if metric == "gradient" else "gradient",
        verdict=verdict(probe),
        caution=caution(probe),
        ranked=ranked,
        scale=fit_scale([bounds(row["per_1000_evaluations"]) for row in probe["ranking"]]),
        bounds=bounds,
        costs=_COSTS,
        best=BEST,
        drift=probe["drift"],
        charts={one["name"]: step_charts(one[metric]["steps"]) for one in ranked},
    )


def verdict(found: Mapping[str, Any]) -> str:
    """Return the recommendation, and the settings that are equally good within the error."""
    chosen, rows = found["recommended"], found["ranking"]
    row = next(row for row in rows if row["name"] == chosen["name"])
    told = f"Recommended: {chosen['name']}, "
    if chosen["step_weight"]:
        told += f"with step weights {weights(chosen['step_weight'])}"
    else:
        told += "with the step weights of the run file, as the best ones are not better"
    told += f"; signal to noise per 1000 evaluations: {spread(row['per_1000_evaluations'])}."
    others = [r for r in rows if r["at"] == row["at"] and r is not row]
    if near := [r["name"] for r in others if r["within_error"]]:
        told += f" Equally good within the error: {', '.join(near)}."
    return told


def caution(found: Mapping[str, Any]) -> str:
    """Return a warning if no setting has a significant signal; empty otherwise."""
    figures = [row["per_1000_evaluations"] for row in found["ranking"]]
    if any(figure["value"] > ERRORS * figure["error"] for figure in figures):
        return ""
    return (
        "No setting has a signal above its error, so the order below may be chance: "
        "use more --batches."
    )


def bounds(row: Mapping[str, float]) -> tuple[float, float]:
    """Return the ends of the interval of an estimate."""
    return row["value"] - ERRORS * row["error"], row["value"] + ERRORS * row["error"]


def step_charts(steps: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return the charts of signal, noise and weights of the steps of one setting."""
    return [
        _chart("Signal of each step", "squared length", steps, {"signal": "signal"}),
        _chart("Noise of each step", "squared length", steps, {"noise": "noise"}),
        _chart(
            "Weight of each step", "weight", steps, {"run file": "weight", "best": "best_weight"}
        ),
    ]


def _chart(
    title: str, unit: str, steps: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> Chart:
    """Return a chart with one line per column, and a band if the column has errors."""
    places = [row["step"] for row in steps]
    lines = []
    for colour, (label, column) in zip(PALETTE, columns.items(), strict=False):
        values = [row[column] for row in steps]
        errors = [ERRORS * row.get(f"{column}_error", 0.0) for row in steps]
        pairs = list(zip(values, errors, strict=True)) if any(errors) else []
        low, high = [v - e for v, e in pairs], [v + e for v, e in pairs]
        lines.append(Line(label, places, values, colour, low, high))
    return Chart(title, "denoising step", unit, lines, from_zero=True)


def figure(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def spread(row: Mapping[str, float]) -> str:
    """Format an estimate and its standard error with equal decimals."""
    digits = max(0, 4 - len(f"{abs(row['value']):.0f}")) if abs(row["value"]) >= 1 else 4
    return f"{row['value']:.{digits}f} ± {row['error']:.{digits}f}"


def weights(steps: Sequence[float]) -> str:
    """Format weights of steps, such as (1, .5, 0)."""
    return f"({', '.join(f'{weight:.2g}' for weight in steps)})"

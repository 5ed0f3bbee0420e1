"""Show what a probe measured as a page: where the signal is, and what it costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.reports.charts import COLOURS, Drawing, framed
from flowalign.reports.hover import hover
from flowalign.reports.pages import render

ERRORS = 2
"""Standard errors to each side of an interval, which holds the truth in about 95 % of cases."""
_SIZE = (320, 200)
_COSTS = {
    "network_evaluations": "1000 evaluations",
    "reward_calls": "1000 reward calls",
    "decodes": "1000 decodes",
    "seconds": "minute",
}
BEST, OWN = "best weights", "run file's weights"


def page(name: str, found: Mapping[str, Any]) -> str:
    """Render the self-contained page of the figures in `probe.json`."""
    metric = found["metric"]
    by_name = {setting["name"]: setting for setting in found["settings"]}
    ranked = [by_name[row["name"]] | {"rank": row} for row in found["ranking"]]
    return render(
        "probe.html.j2",
        {"figure": figure, "spread": spread, "weights": weights},
        name=name,
        metric=metric,
        other="update" if metric == "gradient" else "gradient",
        verdict=verdict(found),
        caution=caution(found),
        ranked=ranked,
        scale=scale([bounds(row["per_1000_evaluations"]) for row in found["ranking"]]),
        bounds=bounds,
        costs=_COSTS,
        best=BEST,
        drift=found["drift"],
        drawn={one["name"]: drawings(one[metric]["steps"]) for one in ranked},
    )


def verdict(found: Mapping[str, Any]) -> str:
    """State what is recommended, and what is as good within the error."""
    chosen, rows = found["recommended"], found["ranking"]
    row = next(row for row in rows if row["name"] == chosen["name"])
    told = f"Recommended: {chosen['name']}, "
    if chosen["step_weight"]:
        told += f"with step weights {weights(chosen['step_weight'])}"
    else:
        told += "with the weights of the run file, which show as much as the best ones"
    told += f"; {spread(row['per_1000_evaluations'])} signal to noise per 1000 evaluations."
    others = [r for r in rows if r["at"] == row["at"] and r is not row]
    if near := [r["name"] for r in others if r["within_error"]]:
        told += f" As good within the error: {', '.join(near)}."
    return told


def caution(found: Mapping[str, Any]) -> str:
    """State that nothing has been told from no signal at all; empty if a setting has."""
    figures = [row["per_1000_evaluations"] for row in found["ranking"]]
    if any(figure["value"] > ERRORS * figure["error"] for figure in figures):
        return ""
    return (
        "No setting has shown a signal beyond the error, so the order below may be chance: "
        "give more --batches."
    )


def bounds(row: Mapping[str, float]) -> tuple[float, float]:
    """Return the ends of the interval of an estimate."""
    return row["value"] - ERRORS * row["error"], row["value"] + ERRORS * row["error"]


def scale(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the offset and the factor that put zero and all intervals on 0 to 100."""
    low, high = min(0.0, *(low for low, _ in intervals)), max(0.0, *(high for _, high in intervals))
    return low, 100 / ((high - low) or 1.0)


def drawings(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, Drawing]]:
    """Draw signal, noise and weights of the steps of one setting."""
    return [
        ("Signal of each step", _bars(steps, {"signal": "signal"}, "squared length")),
        ("Noise of each step", _bars(steps, {"noise": "noise"}, "squared length")),
        (
            "Weight of each step",
            _bars(steps, {"run file": "weight", "best": "best_weight"}, "weight"),
        ),
    ]


def _bars(steps: Sequence[Mapping[str, Any]], columns: Mapping[str, str], unit: str) -> Drawing:
    """Draw one bar or several for each step, with intervals where there are errors."""
    from matplotlib.ticker import MaxNLocator

    places = [float(row["step"]) for row in steps]

    def draw(axes: Any) -> None:
        width = 0.7 / len(columns)
        for i, (label, column) in enumerate(columns.items()):
            beside = [place + (i - (len(columns) - 1) / 2) * width for place in places]
            errors = [ERRORS * row.get(f"{column}_error", 0.0) for row in steps]
            shown = {"yerr": errors, "capsize": 3} if any(errors) else {}
            colour = COLOURS[-1] if column == "weight" else COLOURS[0]
            values = [row[column] for row in steps]
            axes.bar(beside, values, width, label=label, color=colour, ecolor="#1c1c1c", **shown)
        axes.axhline(0, color="#1c1c1c", linewidth=0.8)
        axes.set(xlabel="denoising step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        if len(columns) > 1:
            axes.figure.legend(loc="outside upper left", ncols=2, frameon=False, handlelength=1.2)

    address, frame = framed(draw, _SIZE)
    lines = {n: (places, [row[column] for row in steps]) for n, column in columns.items()}
    return Drawing(address, hover(frame, "step", lines))


def figure(value: float) -> str:
    """Format a number in three digits."""
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def spread(row: Mapping[str, float]) -> str:
    """Format an estimate with its standard error, rounded alike."""
    digits = max(0, 4 - len(f"{abs(row['value']):.0f}")) if abs(row["value"]) >= 1 else 4
    return f"{row['value']:.{digits}f} ± {row['error']:.{digits}f}"


def weights(steps: Sequence[float]) -> str:
    """Format weights of steps, (1, .5, 0)."""
    return f"({', '.join(f'{weight:.2g}' for weight in steps)})"

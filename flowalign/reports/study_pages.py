"""Render the pages of a benchmark and of a probe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.reports import pages
from flowalign.reports.pages import PALETTE, Chart, Line, fit_scale, render
from flowalign.utils.files import write_text

EXAMPLES = 6
"""Number of prompts in each row of images."""


@dataclass(frozen=True)
class ScoredImages:
    """Images of the first and of the last model, with the scores that order them."""

    metric: str
    """Name of the score."""
    prompts: Sequence[str]
    """Prompt of each item."""
    before: Sequence[float]
    """Scores of the first model."""
    after: Sequence[float]
    """Scores of the last model; the same as `before` if there is one model only."""
    pictures: Callable[[int], list[str]]
    """Function that returns the images of an item as data URLs, the first model's before the last
    model's."""
    paired: bool
    """Whether an item has images of two models."""


def write_benchmark(
    page: Path,
    title: str,
    table: Sequence[Sequence[str]],
    notes: Sequence[str],
    published: Sequence[Mapping[str, Any]],
    images: ScoredImages,
) -> None:
    """Write the self-contained page."""
    parts = [
        {"title": name, "items": [_show(images, i) for i in chosen]}
        for name, chosen in choose(images.before, images.after, images.prompts).items()
        if chosen
    ]
    text = pages.render(
        "benchmark.html.j2",
        title=title,
        head=table[0],
        rows=table[1:],
        notes=notes,
        published=published,
        parts=parts,
        metric=images.metric,
        paired=images.paired,
    )
    write_text(page, text)


def choose(
    before: Sequence[float], after: Sequence[float], prompts: Sequence[str]
) -> dict[str, list[int]]:
    """Return the items on the page by heading, one per prompt; ties keep the order of the file."""
    start, end = np.asarray(before, float), np.asarray(after, float)
    change = end - start

    def first(order: np.ndarray) -> list[int]:
        by_prompt: dict[str, int] = {}
        for i in map(int, order):
            by_prompt.setdefault(prompts[i], i)
        return list(by_prompt.values())[:EXAMPLES]

    up, down = np.argsort(-change, kind="stable"), np.argsort(change, kind="stable")
    return {
        "Best": first(np.argsort(-end, kind="stable")),
        "Worst": first(np.argsort(end, kind="stable")),
        "Improved most": first(up[change[up] > 0]),
        "Fell most": first(down[change[down] < 0]),
    }


def _show(images: ScoredImages, i: int) -> dict[str, Any]:
    scores = dict.fromkeys([f"{images.before[i]:.4g}", f"{images.after[i]:.4g}"])
    return {
        "prompt": images.prompts[i],
        "score": " to ".join(scores),
        "pictures": images.pictures(i),
    }


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
            "Weight of each step",
            "weight",
            steps,
            {"run file": "weight", "best": "best_weight"},
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

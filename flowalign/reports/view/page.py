"""Render the page of `flowalign view`: a table of all runs, and the chosen runs side by side."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import get_args
from urllib.parse import quote

from flowalign.reports.charts import PALETTE, Chart, Line
from flowalign.reports.pages import render
from flowalign.reports.panels import MAIN, title_of
from flowalign.reports.view.runs import Curve, RunState, Status
from flowalign.utils.console import duration

MOST_CHOSEN = len(PALETTE)
"""Largest number of runs in a chart, one per colour."""
_AT_FIRST = 4
"""Number of runs that are shown if none is chosen."""
_MOST_FAILURES = 20
_FIRST = ("reward_mean", "implicit_accuracy")
_NOT_TOLD = ("output_dir",)
"""Settings that differ between any two runs."""


def page(
    name: str, runs: Sequence[RunState], wanted: Sequence[str], more: bool, every: float
) -> str:
    """Return the page about these runs; `wanted` are names, `more` asks for all metrics."""
    known = {run.name: run for run in runs}
    asked = [known[n] for n in dict.fromkeys(wanted) if n in known]
    chosen = (asked or list(runs)[:_AT_FIRST])[:MOST_CHOSEN]
    colours = {run.name: PALETTE[i] for i, run in enumerate(chosen)}
    charts, constants = curves(chosen, colours, more)
    failures = [run for run in runs if run.status in ("failed", "silent")]
    return render(
        "view.html.j2",
        {"left": left, "value": value, "address": address, "duration": duration},
        name=name,
        runs=runs,
        counts=counts(runs),
        chosen=chosen,
        colours=colours,
        dropped=len(asked) - len(chosen) if asked else 0,
        differences=differences(chosen),
        charts=charts,
        constants=constants,
        more=more,
        failures=failures[:_MOST_FAILURES],
        further=max(0, len(failures) - _MOST_FAILURES),
        every=every,
        now=time.strftime("%H:%M:%S"),
    )


def counts(runs: Sequence[RunState]) -> str:
    """Return the number of runs by status, as text."""
    statuses = [run.status for run in runs]
    found = [status for status in get_args(Status) if status in statuses]
    return ", ".join(f"{statuses.count(status)} {status}" for status in found)


def differences(runs: Sequence[RunState]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, with the value of each run; a dash if none."""
    settings = [run.content.settings for run in runs]
    names = dict.fromkeys(name for one in settings for name in one if name not in _NOT_TOLD)
    rows = [(name, [one.get(name, "-") for one in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def curves(
    runs: Sequence[RunState], colours: Mapping[str, str], more: bool
) -> tuple[list[Chart], list[tuple[str, str]]]:
    """Return the charts of the runs, and the metrics with one value everywhere as text."""
    by_metric: dict[str, dict[str, Curve]] = {}
    for run in runs:
        for metric, curve in run.content.curves.items():
            by_metric.setdefault(metric, {})[run.name] = curve
    charts, constants = [], []
    for metric in _order(by_metric, more):
        known, title = by_metric[metric], title_of(metric)
        values = {v for _, column in known.values() for v in column if math.isfinite(v)}
        if len(values) == 1:
            constants.append((title, f"{values.pop():.4g}"))
        else:
            lines = [Line(name, *curve, colour=colours[name]) for name, curve in known.items()]
            charts.append(Chart(title, "step", "", lines))
    return charts, constants


def _order(metrics: Mapping[str, object], more: bool) -> list[str]:
    """Return the metrics in reading order: rewards, held-out dimensions, health; then the rest."""
    held_out = [m for m in metrics if m.startswith("eval/") and "/" not in m[5:]]
    main = [m for m in (*_FIRST, *held_out, *MAIN) if m in metrics]
    return main + [m for m in sorted(metrics) if m not in main] if more else main


def left(run: RunState) -> str:
    """Return the time until a run finishes, or since its last change, as text."""
    if math.isfinite(run.seconds_left):
        return f"{duration(run.seconds_left)} left"
    return f"{duration(run.quiet)} ago"


def value(number: float) -> str:
    """Format a value of a metric; a dash if it is NaN."""
    return f"{number:.3f}" if math.isfinite(number) else "-"


def address(run: RunState, file: str) -> str:
    """Return the server's address of a file of a run."""
    return "/files/" + quote(f"{run.name}/{file}")

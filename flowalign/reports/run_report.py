"""Write `report.html`: one self-contained page about a run, made from the files in its directory.

Parts without data are left out, such as a missing evaluation or missing images. The run may still
be in progress.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.reports.credit_view import read_credit
from flowalign.reports.pages import PALETTE, Chart, Line, render, score
from flowalign.reports.panels import (
    chart,
    describe,
    describe_run,
    explain_loading,
    is_constant,
    num_smoothed,
    read_weights,
    select_panels,
)
from flowalign.reports.records import Change, Lines, collect, number, read_json, read_scores, worst
from flowalign.reports.records import changes as changes_of_prompts
from flowalign.reports.samples import find_strips, samples
from flowalign.utils.console import duration
from flowalign.utils.files import write_text
from flowalign.utils.run_events import commands, hide_in_settings
from flowalign.utils.tracking import read_metrics

_COMPARISON = "../../compare.html"
"""Path from a run directory to the page of its comparison."""
TRAINING_SAMPLES = "training_samples"
"""Folder of samples during training, which the page shows if there are none of evaluations."""
COMPARISON_LINK = f'href="{_COMPARISON}"'
_HEADLINES = ("exact_match", "unseen/exact_match", "seen/exact_match", "weighted", "reward_mean")
_CHECKS = {
    "loss_at_start": ("loss before any update", "loss of a policy equal to its reference"),
    "ratio_drift": ("largest |ratio - 1| before any update, denoising step", "near 0"),
    "mode_drift": ("largest |log ratio| between passes with and without gradient", "near 0"),
    "gradient_rms": ("root mean square of the first gradient", "above 100 optimizer.eps"),
    "gradient_share": ("share of the trained parameters that had a gradient", "1"),
    "kl_gradient": ("size of the gradient of the KL term", "above 0"),
    "max_rank_difference": ("difference between the weights of the ranks", "0"),
}


def write_report(
    folder: Path, running: bool = False, rows: Sequence[Mapping[str, Any]] | None = None
) -> Path:
    """Write `report.html` into a run directory atomically, and return its path.

    The page of a running run reloads itself. `rows` are the metrics; None reads them.
    """
    series = collect(read_metrics(folder) if rows is None else rows)
    summary = read_json(folder / "summary.json")
    changes = outcomes(summary, series)
    config = folder / "config.yaml"
    weights = read_weights(config)
    panels = select_panels(series, weights)
    compared = (folder / _COMPARISON).is_file()
    page = render(
        "run.html.j2",
        {"number": score, "signed": _signed},
        name="/".join(folder.resolve().parts[-2 if compared else -1 :]),
        running=running,
        status="running" if running else summary.get("status", ""),
        comparison=_COMPARISON if compared else "",
        about=describe_run(config),
        loading=explain_loading(folder),
        verdict=verdict(changes, summary, series),
        warnings=summary.get("warnings") or {},
        tiles=tiles(changes, summary),
        smoothed=num_smoothed(len(series.get("reward_mean", {}))),
        charts=[chart(panel) for panel in panels if not is_constant(panel)],
        sentences=[(panel, describe(panel)) for panel in panels if is_constant(panel)],
        samples=samples(folder / "samples") or samples(folder / TRAINING_SAMPLES),
        strips=find_strips(folder / "samples") or find_strips(folder / TRAINING_SAMPLES),
        worst=worst_prompts(folder / "samples", weights),
        credit_views=read_credit(folder / "credit"),
        calibration=calibration_charts(read_json(folder / "calibration.json")),
        checks=checks(series),
        changes=changes,
        commands=commands(folder),
        config=hide_in_settings(config.read_text(encoding="utf-8")) if config.exists() else "",
    )
    target = folder / "report.html"
    write_text(target, page)
    return target


def worst_prompts(folder: Path, weights: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the prompts that fell most and those with the lowest reward at the end.

    They are found from the first and last evaluation; the result is empty if none wrote scores.
    """
    steps = sorted(int(file.stem[5:]) for file in folder.glob("step-*.json"))
    ends = [read_scores(folder, step) for step in dict.fromkeys([*steps[:1], *steps[-1:]])]
    known = [scores for scores in ends if scores]
    if not known:
        return {}
    found = changes_of_prompts(known[0] if len(known) > 1 else None, known[-1], weights)
    fallen, lowest = worst(found)
    what = "weighted reward" if weights else "sum of the dimensions"
    many = len({change.split for change in found}) > 1
    return {"what": what, "fallen": fallen, "lowest": lowest, "num": len(found), "splits": many}


def outcomes(summary: Mapping[str, Any], series: Lines) -> list[Change]:
    """Return held-out values before and after, from the summary or from both end evaluations."""
    first, last = {}, {}
    for name, line in series.items():
        finite = [step for step in sorted(line) if math.isfinite(line[step])]
        if name.startswith("eval/"):
            first[name[5:]] = line[finite[0]]
            last |= {name[5:]: line[finite[-1]]} if len(finite) > 1 else {}
    told: dict[str, Any] = summary.get("before") or {}
    before = told | first | told  # in the summary's order, with its values
    after = last | (summary.get("after") or {})
    found = [Change(n, number(before.get(n)), number(after.get(n))) for n in before | after]
    return [c for c in found if math.isfinite(c.before) or math.isfinite(c.after)]


def headline(changes: Sequence[Change]) -> Change | None:
    """Return the held-out quantity at the top of the page."""
    complete = {change.name: change for change in changes if math.isfinite(change.difference)}
    names = [name for name in _HEADLINES if name in complete] + list(complete)
    return complete[names[0]] if names else None


def verdict(changes: Sequence[Change], summary: Mapping[str, Any], series: Lines) -> str:
    """Return a sentence on the change by training."""
    training = [v for _, v in sorted(series.get("reward_mean", {}).items()) if math.isfinite(v)]
    trained = [max(line) for name, line in series.items() if not name.startswith("eval/")]
    num_steps = summary.get("steps") or max(trained, default=0)
    over = f"over {num_steps} step{'s' * (num_steps != 1)}"
    ending = {"interrupted": "; the run was interrupted.", "running": "; the run is in progress."}
    ending = ending.get(str(summary.get("status", "" if summary else "running")), ".")
    if top := headline(changes):
        return (
            f"Held-out {top.name} went from {top.before:.3f} to {top.after:.3f} "
            f"({top.difference:+.3f}) {over}{ending}"
        )
    if len(training) < 2:
        return "Too few steps have been recorded for a verdict" + ending
    n = num_smoothed(len(training))
    start, stop = np.mean(training[:n]), np.mean(training[-n:])
    which = f"means of the first and last {n} steps" if n > 1 else "first and last step"
    return f"Training reward went from {start:.3f} to {stop:.3f} ({which}) {over}{ending}"


def tiles(changes: Sequence[Change], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the main results at the top of the page, as labels and values."""
    shown = []
    if top := headline(changes):
        shown = [
            (f"{top.name} before", f"{top.before:.3f}"),
            (f"{top.name} after", f"{top.after:.3f}"),
            ("change", f"{top.difference:+.3f}"),
        ]
    seconds = number(summary.get("seconds"))
    if math.isfinite(seconds):
        shown.append(("time (h:min:s)" if seconds >= 3600 else "time (min:s)", duration(seconds)))
    for name in ("steps", "network_evaluations", "reward_calls"):
        if math.isfinite(number(summary.get(name))):
            shown.append((name.replace("_", " "), _count(number(summary[name]))))
    if summary.get("seed") is not None:
        shown.append(("seed", str(summary["seed"])))
    return shown


def checks(series: Lines) -> list[dict[str, str]]:
    """Return the last measurement of each check, one row each, with denoising steps in order."""
    rows = []
    for name in sorted(series, key=_natural):
        if not name.startswith("check/"):
            continue
        kind, _, k = name[6:].partition("_drift_")
        kind = "ratio_drift" if k else kind
        meaning, wanted = _CHECKS.get(kind, (name[6:].replace("_", " "), ""))
        step, value = max((s, v) for s, v in series[name].items() if math.isfinite(v))
        what = f"{meaning} {k}".strip()
        rows.append({"what": what, "wanted": wanted, "step": str(step), "value": f"{value:.3g}"})
    return rows


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.2f} M"


def _signed(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else "-"


_AFTER, _BEFORE, *_ = PALETTE
_REST = PALETTE[-1]


def calibration_charts(history: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of the levels and of the shares of the calibrated steps.

    `history` is the content of a calibration file. The list is empty if no iteration valued a step.
    """
    valid = [row["valid"] for row in history.get("iterations", ())]
    steps = np.flatnonzero(np.sum(valid, axis=0))  # the remaining steps are ODE steps
    if not len(steps):
        return []
    return [_level_chart(history, steps), _share_chart(history, steps)]


def _level_chart(history: Mapping[str, Any], steps: np.ndarray) -> Chart:
    """Return the chart of psi, with a log axis as steps differ by orders of magnitude."""
    first, *others = [np.array(row["psi"])[steps] for row in history["iterations"]]
    label = f"after {len(history['iterations'])} iterations"
    lines = [
        *(Line("", steps, psi, _REST, width=1.0, faint=True) for psi in others),
        Line("initial", steps, first, _BEFORE, dash=(4, 3)),
        Line(label, steps, np.array(history["psi"])[steps], _AFTER, width=2.5),
    ]
    return Chart("Noise level", "denoising step", "noise level psi", lines, log=True)


def _share_chart(history: Mapping[str, Any], steps: np.ndarray) -> Chart:
    """Return the chart of the share of positive gains, without ties, and its target."""
    marks, aim = [0.5], ""
    if history["settings"]["rule"] == "damped":
        target = (1 - history["settings"]["threshold"]) / 2
        marks, aim = [0.5, target], f" (aim: {target:.0%})"
    lines = []
    ends = history["iterations"][0], history["iterations"][-1]
    for label, row, colour in zip(("first", "last"), ends, (_BEFORE, _AFTER), strict=True):
        share, error = _share(row, steps)
        lines.append(Line(label, steps, share, colour, share - error, share + error))
    title = f"Share of gains above 0{aim}"
    return Chart(title, "denoising step", "share ± error", lines, from_zero=True, y_marks=marks)


def _share(row: Mapping[str, Any], steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positive / (positive + negative) and its standard error; NaN if all gains are ties."""
    positive, negative = (np.array(row[s], float)[steps] for s in ("positive", "negative"))
    decided = np.where(positive + negative > 0, positive + negative, np.nan)
    share = positive / decided
    return share, np.sqrt(share * (1 - share) / decided)

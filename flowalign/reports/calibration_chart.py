"""Draw a calibration: the noise level of each step, and how often noise helped."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.reports.charts import data_address
from flowalign.sampling.calibration import History, Iteration

_BEFORE, _AFTER, _REST = "#d55e00", "#0072b2", "#777777"
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
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
    "svg.hashsalt": "flowalign",
}


def draw_calibration(history: History, png: Path | None = None) -> str:
    """Draw levels and shares of the calibrated steps as an SVG data URL, 320 units wide.

    With `png`, also write a file of twice that size.

    Raises:
        ValueError: no iteration has been made yet, or no step was valued in any.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    steps = _calibrated(history)
    with rc_context(_STYLE):
        figure = Figure(figsize=(320 / 72, 420 / 72), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _draw_levels(above, history, steps)
        _draw_shares(below, history, steps)
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_minor_formatter(NullFormatter())
        below.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        for axes in (above, below):
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=3,
                frameon=False,
                handlelength=1.4,
                columnspacing=1.2,
                borderaxespad=0.2,
            )
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        if png is not None:  # after the SVG, whose layout another resolution would change
            figure.savefig(png, dpi=144)
    return data_address("svg+xml", drawn.getvalue())


def _calibrated(history: History) -> np.ndarray:
    """Return the indices of steps that some iteration valued; the others are ODE steps."""
    steps = np.flatnonzero(np.sum([row.valid for row in history.iterations] or [[0]], axis=0))
    if len(steps) == 0:
        raise ValueError(
            f"a calibration of {len(history.iterations)} iterations without gains has no picture"
        )
    return steps


def _draw_levels(axes: Any, history: History, steps: np.ndarray) -> None:
    """Draw psi on a logarithmic axis, as steps differ by orders of magnitude."""
    first, *others = [np.array(row.psi)[steps] for row in history.iterations]
    for psi in others:
        axes.plot(steps, psi, color=_REST, alpha=0.3, linewidth=0.7)
    axes.plot(steps, first, "o--", color=_BEFORE, markersize=3, label="initial")
    axes.plot(
        steps,
        np.array(history.psi)[steps],
        "o-",
        color=_AFTER,
        linewidth=2.4,
        label=f"after {len(history.iterations)} iterations",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.set_ylabel("noise level psi")


def _draw_shares(axes: Any, history: History, steps: np.ndarray) -> None:
    """Draw the share of positive gains with its standard error, without ties, and its target."""
    if history.settings["rule"] == "damped":
        aim = (1 - history.settings["threshold"]) / 2
        axes.axhline(aim, color=_REST, linestyle=":", label=f"aim {aim:.0%}")
    axes.axhline(0.5, color=_REST, linewidth=0.9)
    ends = history.iterations[0], history.iterations[-1]
    for i, (row, colour) in enumerate(zip(ends, (_BEFORE, _AFTER), strict=True)):
        share, error = _share(row, steps)
        beside = steps + (0.06 if i else -0.06)  # or one error bar would hide the other
        label = ("first", "last")[i]
        axes.errorbar(beside, share, error, color=colour, fmt="o-", capsize=2, label=label)
    axes.set(
        ylim=(-0.05, 1.05), yticks=(0, 0.5, 1), xlabel="denoising step", ylabel="gains above 0"
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _share(row: Iteration, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positive / (positive + negative) and its standard error; NaN where all are ties."""
    positive, negative = (
        np.array(side, dtype=float)[steps] for side in (row.positive, row.negative)
    )
    decided = np.where(positive + negative > 0, positive + negative, np.nan)
    share = positive / decided
    return share, np.sqrt(share * (1 - share) / decided)

"""Chart a calibration: the noise level of each step, and how often noise helped."""

import numpy as np

from flowalign.reports.charts import PALETTE, Chart, Line
from flowalign.sampling.calibration import History, Iteration

_AFTER, _BEFORE, *_ = PALETTE
_REST = PALETTE[-1]


def calibration_charts(history: History) -> list[Chart]:
    """Return the charts of the levels and of the shares of the calibrated steps.

    Raises:
        ValueError: There is no iteration yet, or no iteration valued a step.
    """
    steps = _calibrated_steps(history)
    return [_level_chart(history, steps), _share_chart(history, steps)]


def _calibrated_steps(history: History) -> np.ndarray:
    """Return the indices of steps that some iteration valued; the remaining steps are ODE steps."""
    steps = np.flatnonzero(np.sum([row.valid for row in history.iterations] or [[0]], axis=0))
    if len(steps) == 0:
        raise ValueError(
            f"a calibration of {len(history.iterations)} iterations has no gains to draw"
        )
    return steps


def _level_chart(history: History, steps: np.ndarray) -> Chart:
    """Return the chart of psi, with a log axis as steps differ by orders of magnitude."""
    first, *others = [np.array(row.psi)[steps] for row in history.iterations]
    label = f"after {len(history.iterations)} iterations"
    lines = [
        *(Line("", steps, psi, _REST, width=1.0, faint=True) for psi in others),
        Line("initial", steps, first, _BEFORE, dash=(4, 3)),
        Line(label, steps, np.array(history.psi)[steps], _AFTER, width=2.5),
    ]
    return Chart("Noise level", "denoising step", "noise level psi", lines, log=True)


def _share_chart(history: History, steps: np.ndarray) -> Chart:
    """Return the chart of the share of positive gains, without ties, and its target."""
    marks, aim = [0.5], ""
    if history.settings["rule"] == "damped":
        target = (1 - history.settings["threshold"]) / 2
        marks, aim = [0.5, target], f" (aim: {target:.0%})"
    lines = []
    ends = history.iterations[0], history.iterations[-1]
    for label, row, colour in zip(("first", "last"), ends, (_BEFORE, _AFTER), strict=True):
        share, error = _share(row, steps)
        lines.append(Line(label, steps, share, colour, share - error, share + error))
    title = f"Share of gains above 0{aim}"
    return Chart(title, "denoising step", "share ± error", lines, from_zero=True, y_marks=marks)


def _share(row: Iteration, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positive / (positive + negative) and its standard error; NaN if all gains are ties."""
    positive, negative = (
        np.array(side, dtype=float)[steps] for side in (row.positive, row.negative)
    )
    decided = np.where(positive + negative > 0, positive + negative, np.nan)
    share = positive / decided
    return share, np.sqrt(share * (1 - share) / decided)

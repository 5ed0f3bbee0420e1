"""Describe charts, and render the templates of this folder.

The script of a page draws charts with uPlot 1.6.32 (MIT). Ten charts of 1,000 steps make a page of
157 kB; plotly and bokeh need a megabyte or more. To update uPlot, replace
`templates/uplot.min.js`.
"""

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#777777")
"""Colours that colour-blind readers can distinguish, on light and on dark pages."""
INK = "ink"
"""Colour of the page's text."""
MAX_POINTS = 300
"""Largest number of points of a line; of longer lines, the lowest and highest point of each stretch
is kept."""


Values = Sequence[float | int] | np.ndarray
"""Values of a line; NaN is a gap."""


@dataclass(frozen=True)
class Line:
    """Line of a chart, or its bars."""

    label: str
    """Name in the legend."""
    x: Values
    y: Values
    colour: str = PALETTE[0]
    low: Values = ()
    """Lower ends of a band; empty without one."""
    high: Values = ()
    """Upper ends of a band."""
    dash: Sequence[float | int] = ()
    """Lengths of dashes and gaps in pixels; empty for a solid line."""
    width: float = 1.5
    faint: bool = False
    """Whether the line is drawn faintly and left out of the legend."""
    bars: bool = False

    def columns(self) -> list[list[float | None]]:
        """Return x, y and the band as columns of JSON; a value that is not finite is a gap."""
        rows = thin(self.y)
        columns = [self.x, self.y, *((self.low, self.high) if len(self.low) else ())]
        return [[_round(float(column[i])) for i in rows] for column in columns]


@dataclass(frozen=True)
class Chart:
    """Chart of a page."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    from_zero: bool = False
    """Whether the vertical axis includes zero."""
    log: bool = False
    """Whether the vertical axis is logarithmic."""
    x_range: tuple[float, float] | None = None
    """Ends of the horizontal axis; None fits it to the lines."""
    x_marks: Sequence[float] = ()
    """Positions of vertical dashed lines."""
    y_marks: Sequence[float] = ()
    """Positions of horizontal dashed lines."""

    @property
    def data(self) -> str:
        """Return the JSON that the script of the page reads from `data-chart`."""
        optional = {"zero": self.from_zero, "log": self.log, "range": self.x_range}
        optional |= {"x_marks": self.x_marks, "y_marks": self.y_marks}
        content = {name: value for name, value in optional.items() if value}
        content |= {"x": self.x_label, "y": self.y_label, "lines": list(map(_encode, self.lines))}
        return json.dumps(content, allow_nan=False, separators=(",", ":"))


def _encode(line: Line) -> dict[str, Any]:
    optional = {"dash": line.dash, "faint": line.faint, "bars": line.bars}
    content = {name: value for name, value in optional.items() if value}
    content |= {"label": line.label, "colour": line.colour, "width": line.width}
    return content | {"columns": line.columns()}


def histogram(title: str, x_label: str, y_label: str, values: Iterable[float]) -> Chart:
    """Return the chart of the distribution of finite values; the dashed line is their median."""
    known = np.fromiter(values, dtype=float)
    counts, edges = np.histogram(known, min(40, max(5, len(np.unique(known)))))
    bars = Line(y_label, (edges[:-1] + edges[1:]) / 2, counts, bars=True)
    median = float(np.median(known))
    return Chart(title, x_label, y_label, [bars], from_zero=True, x_marks=[median])


def thin(values: Values, most: int = MAX_POINTS) -> list[int]:
    """Return the indices of the points to keep: the lowest and the highest of each stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    kept, size = {0, len(values) - 1}, 2 * (len(values) - 1) / (most - 2)
    for k in range(most // 2 - 1):
        stretch = range(1 + math.floor(k * size), 1 + math.floor((k + 1) * size))
        finite = [i for i in stretch if i < len(values) and math.isfinite(values[i])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def _round(value: float) -> float | None:
    """Return a number with five digits, which halves the page; None if it is not finite."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.5g}" if abs(value) < 1e5 else round(value))


def data_address(kind: str, content: bytes) -> str:
    """Return an image as the `src` of an <img>, so the page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def render(
    template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """Return a page or a Markdown text; missing names raise, and pages escape their values."""
    environment = _open_environment(template)
    environment.filters |= dict(filters or {})
    return environment.get_template(template).render(**values)


@cache
def _open_environment(template: str) -> jinja2.Environment:
    """Return the environment of a template, which compiles it once."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=".html." in template,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def score(value: float) -> str:
    """Format a number with three decimals; a dash if it was not measured."""
    return f"{value:.3f}" if math.isfinite(value) else "-"


def fit_scale(intervals: Sequence[tuple[float, float]], mark: float = 0.0) -> tuple[float, float]:
    """Return the offset and the factor that map a mark and all intervals to 0 to 100."""
    low = min([mark, *(low for low, _ in intervals)])
    high = max([mark, *(high for _, high in intervals)])
    return low, 100 / ((high - low) or 1.0)

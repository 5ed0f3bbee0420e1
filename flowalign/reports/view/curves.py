"""Draw the curves of several runs in one small SVG, fast enough for a page that renews itself."""

import math
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from flowalign.reports.hover import Frame, hover
from flowalign.reports.view.runs import Curve

WIDTH, HEIGHT = 350, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 342.0, 10.0, 176.0
"""Edges of the axes."""


def draw(lines: Mapping[str, Curve], colours: Mapping[str, str]) -> tuple[Markup, str]:
    """Return the curves as an SVG, and their values as the attribute `data-hover`."""
    x = _span([step for steps, _ in lines.values() for step in steps])
    y = _span([v for _, values in lines.values() for v in values if math.isfinite(v)])
    parts = [_axes(x, y)]
    for name, (steps, values) in lines.items():
        points = [
            (_place(step, x, _LEFT, _RIGHT), _place(value, y, _BOTTOM, _TOP))
            for step, value in zip(steps, values, strict=True)
        ]
        parts += [_line(piece, colours[name]) for piece in _pieces(points)]
    frame = Frame(_LEFT / WIDTH, _RIGHT / WIDTH, *x)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
    return Markup(svg), hover(frame, "step", lines)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round numbers in a range, whose distance is 1, 2 or 5 times 10^k."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    factors = (f * size for f in (1, 2, 5, 10, 20))
    step = next(s for s in factors if (math.floor(high / s) - math.ceil(low / s)) < most)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [k * step for k in range(first, last + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return a range that holds all values with a margin, and is not empty."""
    low, high = min(values), max(values)
    margin = 0.03 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin


def _place(value: float, span: tuple[float, float], first: float, last: float) -> float:
    return first + (value - span[0]) / (span[1] - span[0]) * (last - first)


def _pieces(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield runs of points without a gap."""
    piece: list[tuple[float, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    few = points if len(points) < 12 else ()
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in few)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>{dots}'


def _axes(x: tuple[float, float], y: tuple[float, float]) -> str:
    parts = []
    for value in ticks(*y, 5):
        at = f"{_place(value, y, _BOTTOM, _TOP):.1f}"
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{at}" y2="{at}" stroke="#e8e8e8"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{at}" dy="4" text-anchor="end">{value:,.6g}</text>')
    for value in (tick for tick in ticks(*x, 6) if tick == round(tick)):
        at = f"{_place(value, x, _LEFT, _RIGHT):.1f}"
        parts.append(f'<text x="{at}" y="{_BOTTOM + 16}" text-anchor="middle">{value:.0f}</text>')
    parts.append(f'<text x="{_RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    parts.append(f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="#999"/>')
    return f'<g font-size="11" fill="#444">{"".join(parts)}</g>'

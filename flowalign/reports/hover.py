"""Give charts values to read: what a page's script shows where the pointer is."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_POINTS = 300
"""Points of a line that a page keeps; of longer lines, the lowest and highest of each stretch."""


@dataclass(frozen=True)
class Frame:
    """Locates the axes of a chart: shares of its width, and the values at both edges."""

    left: float
    right: float
    first: float
    last: float


def hover(
    frame: Frame, name: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> str:
    """Return the `data-hover` attribute of a figure; `name` is what the horizontal axis counts."""
    shown = []
    for label, (x, y) in lines.items():
        kept = [i for i in thinned(y) if math.isfinite(y[i])]
        points = [[_short(x[i]) for i in kept], [_short(y[i]) for i in kept]]
        shown.append([label, *points])
    edges = [round(edge, 4) for edge in (frame.left, frame.right)]
    content = {"edges": edges, "range": [frame.first, frame.last], "name": name, "lines": shown}
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
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


def _short(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)

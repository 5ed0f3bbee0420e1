"""Read the files of a run: metrics over steps, and JSON that may be truncated."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Series = dict[int, float]
"""Value by step; NaN if it was measured but not finite."""
Lines = dict[str, Series]
"""Series by label."""
_NO_METRICS = ("step", "seconds", "evaluated_after")

_LARGEST = 1e300


def collect(rows: Iterable[Mapping[str, Any]]) -> Lines:
    """Return every metric over steps; metrics without any finite value are left out.

    The first step is 1, as in the terminal; rows of `metrics.jsonl` count from 0. An evaluation is
    placed at the number of steps before it, like its samples.
    """
    series: Lines = {}
    for row in rows:
        after = number(row.get("evaluated_after"))
        for name, value in row.items():
            if name not in _NO_METRICS:
                step = int(after) if math.isfinite(after) else row["step"] + 1
                series.setdefault(name, {})[step] = number(value)
    return {name: s for name, s in series.items() if any(map(math.isfinite, s.values()))}


def number(value: Any) -> float:
    """Return a JSON value as a number; NaN if a chart cannot show it."""
    known = isinstance(value, int | float) and abs(value) < _LARGEST
    return float(value) if known else math.nan


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if it is missing or truncated."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

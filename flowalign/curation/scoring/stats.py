"""Count the rows and failures of a scoring job, and keep its scores for summary and page."""

import heapq
import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Row = Mapping[str, Any]
EXAMPLES = 6
"""Number of best and of worst rows that are kept of every dimension."""
_FAILURES = 8
"""Number of failed rows that are kept."""
_LISTED_REASONS = 50
_LABELS = ("rank/", "votes/", "rating/")
"""Beginnings of the columns of human labels."""


def dims_of(row: Row) -> list[str]:
    """Return the dimensions of a row of scores."""
    return [name.removesuffix("_valid") for name in row if name.endswith("_valid")]


@dataclass
class RunningStats:
    """Counts of rows and failures, all scores, and a few rows."""

    rows: int = 0
    records: int = 0
    """Number of records; a record with several samples has several rows."""
    failed: int = 0
    """Number of rows with a dimension that could not be scored."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of rows per kind of problem: the text before the first colon."""
    columns: dict[str, array] = field(default_factory=dict)
    """Scores of every dimension, one per row; NaN if a row has none."""
    ends: dict[str, tuple[list, list]] = field(default_factory=dict)
    """Heaps of the best and of the worst rows of every dimension; of equal scores, the first."""
    failures: list[Row] = field(default_factory=list)
    """First rows that failed."""
    judged_by_people: bool = False

    def add(self, row: Row) -> None:
        """Count one row."""
        self.rows += 1
        self.records += row["medium"] == 0
        self.judged_by_people |= any(
            name.startswith(("rank/", "votes/", "rating/")) for name in row
        )
        for reason in filter(None, (row["reason"] or "").split("; ")):
            self.reasons[reason.partition(":")[0]] += 1
        if not all(row[f"{dim}_valid"] for dim in dims_of(row)):
            self.failed += 1
            self.failures += [row] if len(self.failures) < _FAILURES else []
        for dim in dims_of(row):
            score = row[dim]
            self.columns.setdefault(dim, array("d")).append(math.nan if score is None else score)
            if score is not None:
                best, worst = self.ends.setdefault(dim, ([], []))
                self._keep(best, score, row)
                self._keep(worst, -score, row)

    def _keep(self, heap: list, value: float, row: Row) -> None:
        """Add a row to a heap of the highest values; among equal values, the first stay."""
        heapq.heappush(heap, (value, -self.rows, row))
        if len(heap) > EXAMPLES:
            heapq.heappop(heap)

    def check(self, max_failed_fraction: float, at_least: int = 1) -> None:
        """Raise TooManyFailures if there are `at_least` rows and a larger share of them failed."""
        if self.rows >= at_least and self.failed > max_failed_fraction * self.rows:
            most = ", ".join(f"{why} ({count})" for why, count in self.reasons.most_common(3))
            allowed = f"more than the allowed share of {max_failed_fraction:g}"
            raise TooManyFailures(f"{self.failed} of {self.rows} rows failed, {allowed}: {most}")

    def summary(self) -> dict[str, Any]:
        """Return counts and statistics, ready for summary.json."""
        dims = {}
        for dim, column in self.columns.items():
            known = np.array(column)[np.isfinite(column)]
            dims[dim] = {"valid": len(known)}
            for name in ("mean", "std", "min", "max") if len(known) else ():
                dims[dim][name] = float(getattr(known, name)())
        return {
            "rows": self.rows,
            "failed": self.failed,
            "failed_fraction": self.failed / self.rows if self.rows else 0.0,
            "reasons": dict(self.reasons.most_common(_LISTED_REASONS)),
            "dimensions": dims,
        }


class TooManyFailures(RuntimeError):
    """Error of a job with more failed rows than it allows; saved rows remain."""


@dataclass
class Progress:
    """Progress of a job in this process; subclasses show it."""

    stats: RunningStats = field(default_factory=RunningStats)
    """Statistics of all saved rows."""
    rows: int = 0
    """Number of rows that this process has scored."""
    in_model: float = 0.0
    """Seconds of model computation."""
    start: float = field(default_factory=time.perf_counter)

    def speed(self) -> dict[str, float]:
        """Return rows per second, and the share of time spent in the models."""
        wall = max(time.perf_counter() - self.start, 1e-9)
        return {"rows_per_second": self.rows / wall, "share_in_model": self.in_model / wall}

    def show(self) -> None:
        """Show the progress after a block; here, nothing is shown."""

"""Accumulate statistics on the rows of a scoring job and on its speed."""

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from flowalign.curation.scoring.part_files import Row

_LISTED_REASONS = 50


@dataclass
class RunningStats:
    """Counts of rows and failures, and statistics of every dimension."""

    rows: int = 0
    records: int = 0
    """Number of records; a record with several samples has several rows."""
    failed: int = 0
    """Number of rows with a dimension that could not be scored."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of rows per kind of problem: the text before the first colon."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Count, mean, sum of squared deviations, lowest and highest score of every dimension."""

    def add(self, row: Row) -> None:
        """Count one row."""
        self.rows += 1
        self.records += row["medium"] == 0
        self.failed += any(row[name] is False for name in row if name.endswith("_valid"))
        for reason in (row["reason"] or "").split("; "):
            if reason:
                self.reasons[reason.partition(":")[0]] += 1
        for dim in (name.removesuffix("_valid") for name in row if name.endswith("_valid")):
            value, seen = row[dim], self.values.setdefault(dim, [0, 0.0, 0.0, math.inf, -math.inf])
            if value is not None:
                count, mean = seen[0] + 1, seen[1] + (value - seen[1]) / (seen[0] + 1)
                squares = seen[2] + (value - seen[1]) * (value - mean)
                seen[:] = [count, mean, squares, min(seen[3], value), max(seen[4], value)]

    def check(self, max_failed_fraction: float, at_least: int = 1) -> None:
        """Raise TooManyFailures if there are `at_least` rows and a larger share of them failed."""
        if self.rows >= at_least and self.failed > max_failed_fraction * self.rows:
            most = ", ".join(f"{why} ({count})" for why, count in self.reasons.most_common(3))
            raise TooManyFailures(
                f"{self.failed} of {self.rows} rows failed, more than the allowed share of "
                f"{max_failed_fraction:g}: {most}",
                self,
            )

    def summary(self) -> dict[str, Any]:
        """Return counts and statistics, ready for summary.json."""
        dims = {}
        for dim, (count, mean, squares, low, high) in self.values.items():
            dims[dim] = {"valid": int(count)}
            if count:
                std = math.sqrt(squares / count)
                dims[dim] |= {"mean": mean, "std": std, "min": low, "max": high}
        return {
            "rows": self.rows,
            "failed": self.failed,
            "failed_fraction": self.failed / self.rows if self.rows else 0.0,
            "reasons": dict(self.reasons.most_common(_LISTED_REASONS)),
            "dimensions": dims,
        }


class TooManyFailures(RuntimeError):
    """Error of a job with more failed rows than it allows; saved rows remain."""

    def __init__(self, message: str, stats: RunningStats):
        super().__init__(message)
        self.stats = stats


@dataclass
class Throughput:
    """Throughput of this process, without rows that earlier processes saved."""

    rows: int = 0
    in_model: float = 0.0
    """Seconds of model computation."""
    start: float = field(default_factory=time.perf_counter)

    def summary(self) -> dict[str, float]:
        """Return rows per second, and the share of time spent in the models."""
        wall = max(time.perf_counter() - self.start, 1e-9)
        return {"rows_per_second": self.rows / wall, "share_in_model": self.in_model / wall}

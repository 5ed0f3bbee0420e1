"""Counts what could not be used of a dataset, and why."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

NAMED = 5
"""Occurrences that are named for every kind of problem."""
EXPECTED = {
    "tie",
    "no answer",
    "single medium",
    "neither liked nor disliked",
    "repeated pair",
    "repeated medium",
}
"""Kinds that published datasets hold by design; every other kind is an error of the row."""


@dataclass
class DropReport:
    """Counts what was dropped, by the kind of problem, and names the first few."""

    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """First occurrences of each kind: file and row, then the details."""

    def add(self, problem: str, where: str = "") -> None:
        """Count one problem: its kind, a colon, and the details."""
        kind, _, details = problem.partition(": ")
        self.dropped[kind] += 1
        named = self.examples.setdefault(kind, [])
        if len(named) < NAMED:
            named.append(": ".join(filter(None, (where, details))))

    @property
    def total(self) -> int:
        """Number of everything that was dropped."""
        return self.dropped.total()

    @property
    def unusable(self) -> int:
        """Number of those dropped for an error: all but the expected kinds."""
        return self.total - sum(self.dropped[kind] for kind in EXPECTED)

    def lines(self) -> list[str]:
        """Return one line per kind: errors before expected kinds, the most frequent first."""
        errors_first = sorted(self.dropped.most_common(), key=lambda item: item[0] in EXPECTED)
        return [
            f"{count:,} {kind}: {'; '.join(self.examples[kind])}" for kind, count in errors_first
        ]

    def summary(self) -> dict[str, Any]:
        """Return counts and first occurrences by kind, ready for JSON."""
        return {
            kind: {"count": count, "first": self.examples[kind]}
            for kind, count in self.dropped.most_common()
        }

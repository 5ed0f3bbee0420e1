"""Count the dropped rows of a dataset by reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

NAMED = 5
"""Number of occurrences that a report names for each kind of problem."""
EXPECTED = {
    "tie",
    "no answer",
    "single item",
    "neither liked nor disliked",
    "repeated pair",
    "repeated item",
}
"""Kinds that published datasets contain by design; every other kind is an error in the row."""


@dataclass
class DropReport:
    """Counts of dropped rows by kind of problem, with the first occurrences."""

    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """First occurrences of each kind: file and row, then the details."""

    def add(self, problem: str, where: str = "") -> None:
        """Count a problem of the form "kind: details" at the row `where`."""
        kind, _, details = problem.partition(": ")
        self.dropped[kind] += 1
        named = self.examples.setdefault(kind, [])
        if len(named) < NAMED:
            named.append(": ".join(filter(None, (where, details))))

    @property
    def total(self) -> int:
        """Return the number of dropped rows, pairs and samples."""
        return self.dropped.total()

    @property
    def unusable(self) -> int:
        """Return the number dropped for an error, that is, for all kinds not in `EXPECTED`."""
        return self.total - sum(self.dropped[kind] for kind in EXPECTED)

    def lines(self) -> list[str]:
        """Return one line per kind, errors before expected kinds, and the most frequent first."""
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

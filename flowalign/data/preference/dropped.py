"""What could not be used, and why."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

NAMED = 5
"""Examples kept of every kind of problem."""
ORDINARY = {
    "tie", "no answer", "single medium", "neither liked nor disliked",
    "repeated pair", "repeated medium",
}  # fmt: skip
"""Kinds that published datasets hold by design; every other one is a fault of the row."""


@dataclass
class Tally:
    """Counts what was dropped, by the kind of problem, and names the first few."""

    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """File and row, and the details."""

    def add(self, problem: str, where: str = "") -> None:
        """Count one problem: its kind, and after a colon the details."""
        kind, _, details = problem.partition(": ")
        self.dropped[kind] += 1
        named = self.examples.setdefault(kind, [])
        if len(named) < NAMED:
            named.append(": ".join(filter(None, (where, details))))

    @property
    def total(self) -> int:
        """All that were dropped."""
        return self.dropped.total()

    @property
    def unusable(self) -> int:
        """Those dropped for a fault: all but the ordinary ones."""
        return self.total - sum(self.dropped[kind] for kind in ORDINARY)

    def lines(self) -> list[str]:
        """For a message, one a kind: faults before what is ordinary, the most frequent first."""
        faults_first = sorted(self.dropped.most_common(), key=lambda item: item[0] in ORDINARY)
        return [
            f"{count:,} {kind}: {'; '.join(self.examples[kind])}" for kind, count in faults_first
        ]

    def summary(self) -> dict[str, Any]:
        """For a file."""
        return {
            kind: {"count": count, "first": self.examples[kind]}
            for kind, count in self.dropped.most_common()
        }

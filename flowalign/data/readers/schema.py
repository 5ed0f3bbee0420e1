"""What a schema is: how to know it by its columns, and how its rows become records."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from flowalign.data.readers.fields import Fields
from flowalign.data.records import Record


@dataclass(frozen=True)
class Schema:
    """One way in which a preference dataset is published."""

    name: str
    columns: tuple[tuple[str, ...], ...]
    """Every one of these must be there, in one of its names."""
    record: Callable[[Sequence[Fields], str], Record]
    """The record of a row, or of all rows of a group, with an id in case they have none."""
    group: str = ""
    """Rows next to each other with the same value in this column are one record."""

    def fits(self, columns: Set[str]) -> bool:
        """Whether all that is needed is there."""
        return all(any(name in columns for name in names) for names in self.columns)

    def needs(self) -> str:
        """For messages."""
        return ", ".join("|".join(names) for names in self.columns)


def present(fields: Fields, names: Sequence[str]) -> str:
    """The first of the names that the row has; the first one where it has none."""
    return next((name for name in names if name in fields), names[0])

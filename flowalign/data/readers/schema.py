"""Defines `Schema`: the columns that identify a format, and how its rows become records."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields
from flowalign.data.readers.stream_rows import Row


@dataclass(frozen=True)
class Schema:
    """Describes one way in which a preference dataset is published."""

    name: str
    columns: tuple[tuple[str, ...], ...]
    """Required columns, each with its alternative names."""
    record: Callable[[Sequence[Fields], str], Record]
    """Converts a row, or all rows of a group, to a record; the text is the default id."""
    group: str = ""
    """Column whose equal values in adjacent rows make one record of them; empty: none does."""
    group_end: str = ""
    """Text before which the group's name ends in that column; empty: the whole value names it."""

    def fits(self, columns: Set[str]) -> bool:
        """Return whether all required columns are present."""
        return all(any(name in columns for name in names) for names in self.columns)

    def group_of(self, row: Row) -> object:
        """Return what rows of one record share."""
        value = row.fields.get(self.group, row.where)
        return str(value).partition(self.group_end)[0] if self.group_end else value

    def needs(self) -> str:
        """Return the required columns, with their alternatives, for messages."""
        return ", ".join("|".join(names) for names in self.columns)


def find_present(fields: Fields, names: Sequence[str]) -> str:
    """Return the first of the names that the row has, or the first name if it has none."""
    return next((name for name in names if name in fields), names[0])

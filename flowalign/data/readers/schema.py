"""Define `Schema`: the columns that identify a format, and the conversion of rows to records."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields
from flowalign.data.readers.stream_rows import Row


@dataclass(frozen=True)
class Schema:
    """Published format of a preference dataset."""

    name: str
    columns: tuple[tuple[str, ...], ...]
    """Required columns, each with its alternative names."""
    record: Callable[[Sequence[Fields], str], Record]
    """Function that converts the rows of a group, and a default id, to a record."""
    group: str = ""
    """Column for grouping: adjacent rows with equal values form one record; empty: no grouping."""
    group_end: str = ""
    """Separator that ends the group name in the column `group`; empty: the name is the value."""

    def fits(self, columns: Set[str]) -> bool:
        """Return whether all required columns are present."""
        return all(any(name in columns for name in names) for names in self.columns)

    def group_of(self, row: Row) -> object:
        """Return the group name of a row, equal for all rows of one record."""
        value = row.fields.get(self.group, row.where)
        return str(value).partition(self.group_end)[0] if self.group_end else value

    def needs(self) -> str:
        """Return the required columns, with their alternatives, for messages."""
        return ", ".join("|".join(names) for names in self.columns)


def find_present(fields: Fields, names: Sequence[str]) -> str:
    """Return the first of `names` that the row has, or `names[0]` if it has none."""
    return next((name for name in names if name in fields), names[0])

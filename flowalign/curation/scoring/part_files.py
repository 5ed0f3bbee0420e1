"""Store scores on disk, in parts that are merged into one table."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

from flowalign.curation.scoring.stats import Row
from flowalign.data.readers.schema import REQUEST_MASK
from flowalign.types import MAY_PASS
from flowalign.utils.files import atomic_write, read_objects, write_rows

T = TypeVar("T")
FIXED = ("record", "medium", "prompt", "path", "reason", "fingerprint")
"""Columns of every table."""
REFERENCES = "references"
"""Column of the paths of a record's references, in tables of records that have some."""
_KINDS: dict[str, str] = dict.fromkeys((*FIXED, REQUEST_MASK), "string")
_KINDS |= {"medium": "int64", REFERENCES: "strings"}
"""Types of columns by name."""
_LABELS = {"rank": "double", "votes": "double", "rating": "double", "both_bad": "bool"}
_LABELS |= {"map": "string"}
"""Types of the columns of human labels and map files, by the prefix before the slash in the
name."""
OWN_COLUMNS = "columns"
"""Field of a saved row with the columns of the dataset that have no meaning for flowalign."""
_ROWS_AT_ONCE = 4096
_STAMPS = "stamps"
_DELETE = "; delete this file, and its rows are scored again"
_DIGITS = 8


class PartFiles:
    """Storage of the rows of each block of records, in one file per block.

    A part is written atomically. So a kill loses only the blocks in progress, an existing block is
    complete, and scoring a block twice gives the same file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._saved: dict[int, list[Row | None]] = {}  # None: the record is scored again
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, block: int) -> bool:
        return self._path(block).exists()

    def select(self, block: int, records: Sequence[T]) -> Sequence[T]:
        """Return the records of a block to score: all, or those with a failure that may pass."""
        if block not in self:
            return records
        rows = list(self.rows([block]))
        places = itertools.accumulate(row["medium"] == 0 for row in rows)
        numbered = list(zip(places, rows, strict=True))
        if again := {n for n, row in numbered if _may_pass(row)}:
            self._saved[block] = [None if n in again else row for n, row in numbered]
        return [record for n, record in enumerate(records, 1) if n in again]

    def write(self, block: int, rows: Sequence[Row], stamps: Sequence[str]) -> None:
        """Save the rows of the records that `select` returned, with the other rows of the block.

        The first line of the file has the stamps of all records of the block.
        """
        fresh = iter(rows)
        rows = [row or next(fresh) for row in self._saved.pop(block, [])] + list(fresh)
        write_rows(self._path(block), ({_STAMPS: stamps}, *rows))

    def rows(self, blocks: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the saved rows of `blocks`, in order.

        Raises:
            ValueError: A block is missing or damaged.
        """
        for block in blocks:
            if block not in self:
                raise ValueError(f"block {block} of {self.folder} has not been scored yet")
            for where, row in itertools.islice(self._lines(block), 1, None):
                if not row.keys() >= {*FIXED}:
                    raise ValueError(f"{where} is no row of scores{_DELETE}")
                yield row

    def drop_changed(self, block: int, stamps: Sequence[str]) -> int:
        """Delete a block if stamps of its records differ; return the number of changed records."""
        _, head = next(self._lines(block), ("", {}))
        saved = head.get(_STAMPS, [])
        changed = sum(a != b for a, b in itertools.zip_longest(saved, stamps))
        if changed:
            self._path(block).unlink()
        return changed

    def blocks(self) -> list[int]:
        """Return the saved blocks, in order."""
        names = (path.stem for path in self.folder.glob("*.jsonl"))
        return sorted(int(name) for name in names if name.isdecimal())

    def complete(self, blocks: Iterable[int]) -> list[int]:
        """Return the saved blocks among `blocks` without a failure that may pass."""
        saved = (block for block in blocks if block in self)
        return [block for block in saved if not any(map(_may_pass, self.rows([block])))]

    def _lines(self, block: int) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            yield from read_objects(self._path(block))
        except ValueError as error:
            raise ValueError(f"{error}{_DELETE}") from error

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:0{_DIGITS}}.jsonl"


def _may_pass(row: Row) -> bool:
    return MAY_PASS in (row["reason"] or "")


def merge(parts: PartFiles, blocks: Sequence[int], table: Path) -> None:
    """Write the rows of all blocks, in order, to one .parquet or .jsonl file."""
    columns = _find_columns(parts.rows(blocks))
    saved = map(join_own_columns, parts.rows(blocks))
    rows = (
        {name: _convert(row.get(name), kind) for name, kind in columns.items()} for row in saved
    )
    if table.suffix == ".parquet":
        _write_parquet(table, rows, columns)
    else:
        write_rows(table, rows)


def join_own_columns(row: Row) -> dict[str, Any]:
    """Return a row with the dataset's own columns next to the columns of scores."""
    return {**{name: row[name] for name in row if name != OWN_COLUMNS}, **row.get(OWN_COLUMNS, {})}


def _convert(value: Any, kind: str) -> Any:
    """Return the value of a cell; in a column of texts, also numbers are texts."""
    return json.dumps(value) if kind == "string" and isinstance(value, int | float) else value


def _find_columns(rows: Iterator[Row]) -> dict[str, str]:
    """Return names and types of all columns; labels that only some rows have are included."""
    names, own = dict[str, None](), dict[str, set[type]]()
    for row in rows:
        names |= dict.fromkeys(row)
        for name, value in row.get(OWN_COLUMNS, {}).items():
            own.setdefault(name, set()).update({type(value)} - {type(None)})
    names.pop(OWN_COLUMNS, None)
    known = {name: _kind_of_name(name) for name in names}
    return known | {name: _kind_of_values(types) for name, types in own.items()}


def _kind_of_name(name: str) -> str:
    prefix, slash, _ = name.partition("/")
    found = _LABELS.get(prefix) if slash else _KINDS.get(name)
    return found or ("bool" if name.endswith("_valid") else "double")


def _kind_of_values(types: Set[type]) -> str:
    kinds = {"bool": {bool}, "int64": {int}, "double": {int, float}}
    return next((kind for kind, known in kinds.items() if types <= known), "string")


def _write_parquet(path: Path, rows: Iterator[Row], columns: Mapping[str, str]) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.list_(pyarrow.string())
    types = {name: texts if kind == "strings" else kind for name, kind in columns.items()}
    schema = pyarrow.schema(types)
    with atomic_write(path) as partial, parquet.ParquetWriter(partial, schema) as writer:
        while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))

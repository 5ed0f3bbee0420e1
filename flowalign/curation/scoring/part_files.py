"""Store scores on disk, in parts that are merged into one table, and count rows and failures."""

import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flowalign.data.readers.schema import REQUEST_MASK
from flowalign.types import MAY_PASS
from flowalign.utils.files import atomic_write, read_objects

T = TypeVar("T")
Row = Mapping[str, Any]
FIXED = {
    "record": "string",
    "medium": "int64",
    "prompt": "string",
    "path": "string",
    "reason": "string",
    "fingerprint": "string",
}
"""Columns of every table, with their types."""
_LABELS = {"rank": "double", "votes": "double", "rating": "double", "both_bad": "bool"}
_LABELS |= {"map": "string"}
"""Types of the columns of human labels and map files, by the prefix before the slash in the
name."""
REFERENCES = "references"
"""Column of the paths of a record's references, in tables of records that have some."""
_REQUEST = {REFERENCES: "strings", REQUEST_MASK: "string"}
"""Types of the columns that only tables of records with references or a mask have."""
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
        entries = ({_STAMPS: stamps}, *rows)
        lines = (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n" for entry in entries)
        with (
            atomic_write(self._path(block)) as partial,
            partial.open("w", encoding="utf-8") as file,
        ):
            file.writelines(lines)
            # The rename must not reach the disk before the rows: a part that exists is complete.
            file.flush()
            os.fsync(file.fileno())

    def rows(self, blocks: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the saved rows of `blocks`, in order.

        Raises:
            ValueError: A block is missing or damaged.
        """
        for block in blocks:
            if block not in self:
                raise ValueError(f"block {block} of {self.folder} has not been scored yet")
            for where, row in itertools.islice(self._lines(block), 1, None):
                if not row.keys() >= FIXED.keys():
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
    columns = _column_types(parts.rows(blocks))
    saved = map(join_own_columns, parts.rows(blocks))
    rows = (
        {name: _convert(row.get(name), kind) for name, kind in columns.items()} for row in saved
    )
    with atomic_write(table) as partial:
        if table.suffix == ".parquet":
            _write_parquet(partial, rows, columns)
        else:
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def join_own_columns(row: Row) -> dict[str, Any]:
    """Return a row with the dataset's own columns next to the columns of scores."""
    return {**{name: row[name] for name in row if name != OWN_COLUMNS}, **row.get(OWN_COLUMNS, {})}


def _convert(value: Any, kind: str) -> Any:
    """Return the value of a cell; in a column of texts, also numbers are texts."""
    return json.dumps(value) if kind == "string" and isinstance(value, int | float) else value


def _find_kind(types: Set[type]) -> str:
    """Return the type of a column, given the types of its values."""
    kinds = {"bool": {bool}, "int64": {int}, "double": {int, float}}
    return next((kind for kind, known in kinds.items() if types <= known), "string")


def _column_types(rows: Iterator[Row]) -> dict[str, str]:
    """Return names and types of all columns; labels that only some rows have are included."""
    names, own = dict[str, None](), dict[str, set[type]]()
    for row in rows:
        names |= dict.fromkeys(row)
        for name, value in row.get(OWN_COLUMNS, {}).items():
            own.setdefault(name, set()).update({type(value)} - {type(None)})
    names.pop(OWN_COLUMNS, None)
    prefixes = {name: name.partition("/")[0] for name in sorted(names) if "/" in name}
    labels = {name: _LABELS[kind] for name, kind in prefixes.items() if kind in _LABELS}
    asked = {name: kind for name, kind in _REQUEST.items() if name in names}
    known = FIXED | asked | labels
    scored = [name for name in names if name not in known]
    known |= {name: "bool" if name.endswith("_valid") else "double" for name in scored}
    return known | {name: _find_kind(types) for name, types in own.items()}


def _write_parquet(path: Path, rows: Iterator[Row], columns: Mapping[str, str]) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {
        "string": pyarrow.string(),
        "strings": pyarrow.list_(pyarrow.string()),
        "int64": pyarrow.int64(),
        "double": pyarrow.float64(),
        "bool": pyarrow.bool_(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def needs_pyarrow() -> None:
    """Raise ValueError if parquet cannot be written, before anything is scored."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "parquet needs pyarrow: pip install 'flowalign-diffusion[data]', or --format jsonl"
        ) from error


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

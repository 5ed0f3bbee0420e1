"""Read the rows of a JSONL, JSON, CSV, parquet or Arrow file as a stream."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowalign.utils.imports import import_optional

_CHARACTERS_AT_ONCE = 1 << 16
_LIST = re.compile(r'\s*(?:\{\s*"\w+"\s*:\s*)?\[')
"""Pattern of the beginning of the list in a JSON file of rows."""
_ROWS_AT_ONCE = 64


class RowProblem(ValueError):
    """Error in one row; the remaining rows can still be used."""


@dataclass(frozen=True)
class Row:
    """Columns of one row, with its location in a file."""

    number: int
    """Number of the row from 1; in a JSONL file the line number."""
    file: Path
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Reason why the row cannot be read; empty if it can."""

    @property
    def where(self) -> str:
        """Return file and row, for messages."""
        return f"{self.file.name} row {self.number}"


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield one object per line; blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse_line(number, path, line)


def _parse_line(number: int, path: Path, line: bytes) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:  # neither UTF-8 nor JSON
        return Row(number, path, problem=f"is not JSON ({error})")
    if not isinstance(fields, dict):
        return Row(number, path, problem="is not a JSON object")
    return Row(number, path, fields)


def read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list without loading the whole list.

    The list may be the first value of an object, as in `{"pairs": [...]}`.

    Raises:
        ValueError: The file is not a JSON list, or is truncated.
    """
    for number, item in enumerate(_iterate_items(path), 1):
        if isinstance(item, dict):
            yield Row(number, path, item)
        else:
            yield Row(number, path, problem="is not a JSON object")


def _iterate_items(path: Path) -> Iterator[Any]:
    """Yield the items of a JSON list; read more whenever the buffer ends inside an item."""
    decoder, at_end = json.JSONDecoder(), False
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(_CHARACTERS_AT_ONCE)
        if not (start := _LIST.match(text)):
            raise ValueError(f"{path} is not a JSON list of rows")
        text = text[start.end() :]
        while not (text := text.lstrip().removeprefix(",").lstrip()).startswith("]"):
            try:
                item, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                if at_end:
                    raise ValueError(f"{path} is truncated or not JSON: {error}") from error
                more = file.read(max(_CHARACTERS_AT_ONCE, len(text)))
                text, at_end = text + more, not more
            else:
                yield item
                text = text[end:]


def read_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """Yield one row per line of a CSV file; cells are texts, and empty cells are absent."""
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="", delimiter=delimiter)
        for number, cells in enumerate(reader, 1):
            if "" in cells or None in cells.values():
                yield Row(number, path, problem="has more or fewer cells than the header")
            else:
                yield Row(number, path, {name: cell for name, cell in cells.items() if cell != ""})


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file, with only a few rows in memory at a time."""
    pyarrow = import_optional("pyarrow", "data")
    parquet = import_optional("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path) as file:
            yield from _number_rows(path, file.iter_batches(_ROWS_AT_ONCE))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


def read_arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow stream, the file format of `datasets.save_to_disk`."""
    pyarrow = import_optional("pyarrow", "data")
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            slices = (
                batch.slice(start, _ROWS_AT_ONCE)
                for batch in stream
                for start in range(0, len(batch), _ROWS_AT_ONCE)
            )
            yield from _number_rows(path, slices)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is truncated or not an Arrow stream: {error}") from error


def _number_rows(path: Path, batches: Iterable[Any]) -> Iterator[Row]:
    rows = (fields for batch in batches for fields in batch.to_pylist())
    return (Row(number, path, fields) for number, fields in enumerate(rows, 1))


def count_rows(path: Path) -> int | None:
    """Return the approximate number of rows of a file; None if counting would be slow."""
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return None

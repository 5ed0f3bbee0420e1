"""Rows as they lie in a file, one after the other, whatever the format."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHARACTERS_AT_ONCE = 1 << 16
_ROWS_AT_ONCE = 64


class RowProblem(ValueError):
    """What is wrong with one row; the others can still be used."""


@dataclass(frozen=True)
class Row:
    """The columns of one row, and where it was found."""

    number: int
    """Counted from 1; in a JSONL file it is the line."""
    file: Path
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.file.name} row {self.number}"


def read_jsonl(path: Path) -> Iterator[Row]:
    """One object a line; blank lines are passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(number, path, line)


def _parsed(number: int, path: Path, line: bytes) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:  # neither UTF-8 nor JSON
        return Row(number, path, problem=f"is not JSON ({error})")
    if not isinstance(fields, dict):
        return Row(number, path, problem="is not a JSON object")
    return Row(number, path, fields)


def read_json(path: Path) -> Iterator[Row]:
    """The objects of one long list, without holding the list.

    Raises:
        ValueError: the file is not a JSON list, or breaks off.
    """
    for number, item in enumerate(_items(path), 1):
        if isinstance(item, dict):
            yield Row(number, path, item)
        else:
            yield Row(number, path, problem="is not a JSON object")


def _items(path: Path) -> Iterator[Any]:
    """What is between the brackets, reading on whenever the buffer ends within an item."""
    decoder, at_end = json.JSONDecoder(), False
    with path.open(encoding="utf-8") as file:
        text = file.read(_CHARACTERS_AT_ONCE).lstrip()
        if not text.startswith("["):
            raise ValueError(f"{path} is not a JSON list of rows")
        text = text[1:]
        while not (text := text.lstrip().removeprefix(",").lstrip()).startswith("]"):
            try:
                item, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                if at_end:
                    raise ValueError(f"{path} breaks off or is not JSON: {error}") from error
                more = file.read(max(_CHARACTERS_AT_ONCE, len(text)))
                text, at_end = text + more, not more
            else:
                yield item
                text = text[end:]


def read_csv(path: Path) -> Iterator[Row]:
    """Cells are text; an empty one is absent."""
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="")
        for number, cells in enumerate(reader, 1):
            if "" in cells or None in cells.values():
                yield Row(number, path, problem="has more or fewer cells than the header")
            else:
                yield Row(number, path, {name: cell for name, cell in cells.items() if cell != ""})


def read_parquet(path: Path) -> Iterator[Row]:
    """Some rows of a row group at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError("parquet needs pyarrow: pip install 'flowalign[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(number, path, fields)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


FORMATS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet,
}  # fmt: skip


def count(path: Path) -> int | None:
    """About how many rows a file has, where that is quickly known."""
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return None

"""Open the rows of a dataset: files, a dataset of the Hub, or Python objects."""

import hashlib
import itertools
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from flowalign.data.readers.find_files import (
    FORMATS,
    find_ending,
    find_files,
    is_medium,
    list_files,
    read_folder,
    refuse_splits,
)
from flowalign.data.readers.formats import ROWS_AT_ONCE, Row, number_rows
from flowalign.data.readers.training_rows import NAMES
from flowalign.utils.errors import explain_errors, require_known
from flowalign.utils.imports import import_optional
from flowalign.utils.live_objects import find_object

Source = str | os.PathLike[str] | Iterable[Any]
"""Dataset: a path, a pattern, `hub:OWNER/NAME:SPLIT`, a `Dataset` or `IterableDataset` of the
library `datasets`, or a list of dictionaries with paths, bytes or PIL images."""
Columns = Mapping[str, str | Sequence[str]]
"""Columns of a dataset by their names in flowalign; several columns become one list."""
_HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>\S+))?$")
_IDENTIFYING_BYTES = 1 << 20
_ROWS_LOOKED_AT = 20


def parse_columns(pairs: Sequence[str]) -> dict[str, str | list[str]] | None:
    """Parse texts such as `prompt=caption` or `images=left,right`; None if there are none."""
    columns: dict[str, str | list[str]] = {}
    for pair in pairs:
        name, _, source = pair.partition("=")
        if not (name and source):
            raise ValueError(f"--columns {pair!r} is not NAME=COLUMN, such as prompt=caption")
        columns[name] = source.split(",") if "," in source else source
    return columns or None


class RowSource(ABC):
    """Rows of a dataset; each iteration reads them again."""

    name: str
    """Path or name given by the user, for messages."""
    root: Path
    """Base folder of relative media paths, unless the user gives another one."""

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """Yield all rows in order."""

    @abstractmethod
    def size(self) -> int | None:
        """Return the approximate number of rows; None if counting would be slow."""

    @abstractmethod
    def identity(self) -> str:
        """Return a hash that differs between datasets; `Record.stamp` has the changes of rows."""

    def columns(self) -> frozenset[str]:
        """Return the columns of the first rows; raise ValueError if there is no readable row."""
        columns, problem = set[str](), ""
        for row in itertools.islice(self, _ROWS_LOOKED_AT):  # not a list: rows may be large
            columns |= row.fields.keys()
            problem = problem or f": {row.where} {row.problem}"
        if not columns:
            raise ValueError(f"{self.name} holds no row{problem}")
        return frozenset(columns)


def open_rows(source: Source, columns: Columns | None = None, names: Set[str] = NAMES) -> RowSource:
    """Open the rows of a dataset, with the columns renamed to those of `columns`.

    Raises:
        ValueError: There is no such dataset, it lacks one of `columns`, or a name is not in
            `names`.
    """
    require_known("columns: flowalign reads no column", columns or (), sorted(names))
    if isinstance(source, str) and (known := find_object(source)) is not None:
        source = known
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        rows = _open_hub(path) if path.startswith("hub:") else FileRows(find_files(path), path)
    else:
        rows = ObjectRows(source)
    return RenamedRows(rows, columns) if columns else rows


class FileRows(RowSource):
    """Rows of one or more files of the same format, or of one folder of media."""

    def __init__(self, files: Sequence[Path], name: str):
        self.files, self.name = files, name
        self.root = files[0] if files[0].is_dir() else files[0].parent

    @override
    def __iter__(self) -> Iterator[Row]:
        for file in self.files:
            yield from (
                read_folder(file) if file.is_dir() else FORMATS[find_ending(file) or ""](file)
            )

    @override
    def size(self) -> int | None:
        counts = [None if file.is_dir() else count_rows(file) for file in self.files]
        return None if None in counts else sum(count or 0 for count in counts)

    @override
    def identity(self) -> str:
        """Return a hash of the names of a folder's media, or the sizes and ends of other files."""
        found = hashlib.sha256()
        for file in self.files:
            for path in filter(is_medium, list_files(file)) if file.is_dir() else [file]:
                found.update(f"{path.relative_to(file.parent).as_posix()}\n".encode())
            if file.is_file():
                found.update(_read_ends(file))
        return found.hexdigest()[:16]


def _read_ends(path: Path) -> bytes:
    """Return the size of a file, and its first and last MiB."""
    with path.open("rb") as file:
        start, size = file.read(_IDENTIFYING_BYTES), file.seek(0, os.SEEK_END)
        file.seek(max(size - _IDENTIFYING_BYTES, 0))
        return b"%d " % size + start + file.read()


def count_rows(path: Path) -> int | None:
    """Return the approximate number of rows of a file; None if counting would be slow."""
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return None


class ObjectRows(RowSource):
    """Rows of a dataset of the library `datasets`, or of a list of dictionaries."""

    root = Path()

    def __init__(self, content: Iterable[Any], name: str = "dataset"):
        self.content, self.name = content, name
        # A dataset of the library can only exist if the library is imported.
        library = sys.modules.get("datasets")
        self._is_arrow = library is not None and isinstance(
            content, library.Dataset | library.IterableDataset
        )
        if isinstance(content, Mapping):
            kind = "splits" if type(content).__name__.endswith("DatasetDict") else "columns"
            remedy = "Give one of them" if kind == "splits" else "Give Dataset.from_dict(...)"
            raise ValueError(f"the dataset is a dictionary of {kind} {list(content)}. {remedy}")
        if isinstance(content, Iterator) or not isinstance(content, Iterable):
            raise ValueError(
                f"a dataset must be a path, a list of dictionaries or a dataset of `datasets`, got "
                f"{type(content).__name__}. An iterator can be read once only: give list(...)"
            )

    @override
    def __iter__(self) -> Iterator[Row]:
        content: Any = self.content
        # Rows in Arrow keep the files of images, which plain rows decode. A transform needs them.
        if self._is_arrow and not _has_transform(content):
            batches = content.with_format("arrow").iter(ROWS_AT_ONCE)
            yield from number_rows(Path(self.name), batches)
            return
        for number, fields in enumerate(content, 1):
            row = Row(number, Path(self.name))
            if isinstance(fields, Mapping):
                plain = {
                    name: value.item() if isinstance(value, np.generic) else value
                    for name, value in fields.items()
                }
                yield replace(row, fields=plain)
            else:
                yield replace(row, problem=f"is a {type(fields).__name__}, not a dictionary")

    @override
    def size(self) -> int | None:
        return len(self.content) if isinstance(self.content, Sized) else None

    @override
    def identity(self) -> str:
        return _hash(f"{self.name} {self.size()}")


def _has_transform(content: Any) -> bool:
    library = sys.modules["datasets"]
    return isinstance(content, library.Dataset) and content.format["type"] == "custom"


def _open_hub(name: str) -> ObjectRows:
    """Open a dataset of the Hugging Face Hub as a stream; offline, open its downloaded copy."""
    if not (parts := _HUB.match(name)):
        raise ValueError(
            f"{name!r} is no dataset of the Hub; write hub:OWNER/NAME:SPLIT, or "
            "hub:OWNER/NAME@REVISION:SPLIT"
        )
    library = import_optional("datasets", "data")
    from huggingface_hub import constants

    wanted = {"path": parts["name"], "revision": parts["revision"]}
    options: dict[str, Any] = {"streaming": not constants.HF_HUB_OFFLINE}
    with explain_errors(f"{name} could not be opened", OSError, ValueError):
        if options["streaming"]:
            config = library.load_dataset_builder(**wanted).config
            if "fragment_scan_options" in vars(config):
                from pyarrow.dataset import ParquetFragmentScanOptions

                # Without this option, a stream of parquet files holds whole files.
                options["fragment_scan_options"] = ParquetFragmentScanOptions(pre_buffer=False)
        content = library.load_dataset(**wanted, split=parts["split"], **options)
    if isinstance(content, Mapping):
        refuse_splits(name, content, f"{name}:{next(iter(content))}")
    return ObjectRows(content, name)


class RenamedRows(RowSource):
    """Rows of another source under the names that flowalign reads."""

    def __init__(self, rows: RowSource, columns: Columns):
        self.rows, self.name, self.root, self.sources = rows, rows.name, rows.root, dict(columns)
        self._used = {
            source
            for one in columns.values()
            for source in ([one] if isinstance(one, str) else one)
        }
        require_known(f"{self.name} has no column", sorted(self._used), sorted(rows.columns()))

    @override
    def __iter__(self) -> Iterator[Row]:
        for row in self.rows:
            fields = {name: value for name, value in row.fields.items() if name not in self._used}
            for name, source in self.sources.items():
                find = row.fields.get
                fields[name] = find(source) if isinstance(source, str) else [*map(find, source)]
            yield row if row.problem else replace(row, fields=fields)

    @override
    def size(self) -> int | None:
        return self.rows.size()

    @override
    def identity(self) -> str:
        return _hash(f"{self.rows.identity()} {sorted(self.sources.items())}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Read preference datasets in their published schemas as streams of records."""

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowalign.data.media_record import Record
from flowalign.data.readers.find_files import (
    FORMATS,
    find_ending,
    find_files,
    is_medium,
    list_files,
    read_folder,
)
from flowalign.data.readers.formats import Row, RowProblem, count_rows
from flowalign.data.readers.published import PUBLISHED
from flowalign.data.readers.published_edits import PUBLISHED_EDITS
from flowalign.data.readers.schema import Fields, Schema
from flowalign.data.readers.training_rows import CHOSEN_REJECTED, DENSE_DPO, GENERIC, KTO, LOCAL_DPO

SCHEMAS = {
    schema.name: schema
    for schema in (
        GENERIC,
        *PUBLISHED,
        *PUBLISHED_EDITS,
        CHOSEN_REJECTED,
        LOCAL_DPO,
        DENSE_DPO,
        KTO,
    )
}
_ROWS_LOOKED_AT = 20
_IDENTIFYING_BYTES = 1 << 20


@dataclass(frozen=True)
class Dataset:
    """Files of a dataset and the schema of its rows; each iteration reads the files again."""

    files: Sequence[Path]
    """One or more files of the same format, or one folder of media."""
    root: Path
    """Base folder of relative media paths."""
    schema: Schema
    """Schema of the rows."""
    path: str = ""
    """Path or pattern given by the user, for messages."""

    def __iter__(self) -> Iterator[Record]:
        """Yield all records in order; an unusable row gives a record with a problem."""
        return (record for _, record in self.iter_located())

    def iter_located(self) -> Iterator[tuple[str, Record]]:
        """Yield all records in order, each with its file and (first) row, for messages."""
        seen: set[bytes] = set()
        for index, rows in enumerate(_group_rows(_read_rows(self.files), self.schema)):
            record = _make_record(self.schema, rows, self.root, index)
            digest = hashlib.blake2b(record.id.encode(), digest_size=16).digest()
            if digest in seen and not record.problem:
                problem = f"duplicate id: {rows[0].where} has id {record.id!r} of an earlier row"
                record = Record(record.id, record.prompt, (), problem=problem)
            seen.add(digest)
            yield rows[0].where, record

    def size(self) -> int | None:
        """Return the approximate number of records; None if counting would be slow."""
        if self.schema.group or self.files[0].is_dir():
            return None
        counts = [count_rows(file) for file in self.files]
        return None if None in counts else sum(found or 0 for found in counts)

    def identity(self) -> str:
        """Return a hash of the names of a folder's media, or the sizes and ends of other files.

        Changes inside the media, their prompts or middle rows are in `Record.stamp`.
        """
        found = hashlib.sha256()
        for file in self.files:
            for path in filter(is_medium, list_files(file)) if file.is_dir() else [file]:
                found.update(f"{path.relative_to(file.parent).as_posix()}\n".encode())
            if file.is_file():
                found.update(_read_ends(file))
        return found.hexdigest()[:16]


def open_dataset(path: str, schema: str = "auto", root: str | None = None) -> Dataset:
    """Open a folder of media, a dataset saved by `datasets`, tables, or tar shards.

    `path` may be a pattern of files of one format, such as `shards/{000..012}.tar`.
    `schema="auto"` detects the schema from the columns. Relative paths start at `root`, or at the
    folder of the file if `root` is None.

    Raises:
        ValueError: The path holds no data, its schema is unknown, or several schemas fit.
    """
    if schema != "auto" and schema not in SCHEMAS:
        raise ValueError(f"schema {schema!r} is unknown; there are auto, {', '.join(SCHEMAS)}")
    if root is not None and not Path(root).is_dir():
        raise ValueError(f"the folder of the media, {root!r}, does not exist")
    files = find_files(path)
    beside = files[0] if files[0].is_dir() else files[0].parent
    first = list(itertools.islice(_read_rows(files), _ROWS_LOOKED_AT))
    columns = frozenset(name for row in first for name in row.fields)
    if not columns:
        problem = f": {first[0].where} {first[0].problem}" if first else ""
        raise ValueError(f"{path} holds no row{problem}")
    chosen = _detect(path, columns) if schema == "auto" else SCHEMAS[schema]
    if not chosen.fits(columns):
        raise ValueError(
            f"schema {chosen.name} needs the columns {chosen.needs()};\n"
            f"{path} has {', '.join(sorted(columns))}"
        )
    return Dataset(files, Path(root) if root else beside, chosen, path)


def _read_rows(files: Sequence[Path]) -> Iterator[Row]:
    for file in files:
        yield from read_folder(file) if file.is_dir() else FORMATS[find_ending(file) or ""](file)


def _group_rows(rows: Iterator[Row], schema: Schema) -> Iterator[list[Row]]:
    if not schema.group:
        yield from ([row] for row in rows)
        return
    for _, group in itertools.groupby(rows, schema.group_of):
        yield list(group)


def _make_record(schema: Schema, rows: Sequence[Row], root: Path, index: int) -> Record:
    """Convert a group of rows to a record; invalid rows give a record with only a problem."""
    default_id = f"#{index + 1}"
    try:
        for row in rows:
            if row.problem:
                raise RowProblem(row.problem)
        return schema.record([Fields(row, root) for row in rows], default_id)
    except RowProblem as problem:
        return Record(default_id, "", (), problem=f"invalid row: {rows[0].where}: {problem}")


def _detect(path: str, columns: frozenset[str]) -> Schema:
    """Return the only published schema that fits the columns, else the generic schema.

    A schema that needs all columns of another schema, and more, takes precedence over it.
    """
    found = [schema for schema in SCHEMAS.values() if schema.fits(columns)]
    narrower = [s for s in found if any(set(s.columns) < set(other.columns) for other in found)]
    published = [s for s in found if s is not GENERIC and s not in narrower]
    if len(published) > 1:
        names = ", ".join(schema.name for schema in published)
        raise ValueError(f"{path} fits several schemas: {names}; choose one with --schema")
    if not found:
        needs = "; ".join(f"{schema.name}: {schema.needs()}" for schema in SCHEMAS.values())
        raise ValueError(
            f"no schema fits the columns {', '.join(sorted(columns))} of {path};\n{needs}"
        )
    return (published or found)[0]


def _read_ends(path: Path) -> bytes:
    """Return the size of a file, and its first and last MiB."""
    with path.open("rb") as file:
        start, size = file.read(_IDENTIFYING_BYTES), file.seek(0, os.SEEK_END)
        file.seek(max(size - _IDENTIFYING_BYTES, 0))
        return b"%d " % size + start + file.read()

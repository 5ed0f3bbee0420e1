"""Read preference datasets in their published schemas as streams of records."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowalign.data.media_record import Record
from flowalign.data.readers.formats import Row, RowProblem
from flowalign.data.readers.published import PUBLISHED
from flowalign.data.readers.schema import Fields, Schema, split_names
from flowalign.data.readers.sources import Columns, RowSource, Source, open_rows, parse_columns
from flowalign.data.readers.training_rows import GENERIC, NAMES, TRAINING
from flowalign.utils.errors import require_known

__all__ = ["SCHEMAS", "Columns", "Dataset", "Source", "open_dataset", "parse_columns"]
SCHEMAS = {schema.name: schema for schema in (*TRAINING, *PUBLISHED)}
_LOOKED_AT = 20
"""Number of first records that are searched for a prompt."""


@dataclass(frozen=True)
class Dataset:
    """Rows of a dataset and their schema; each iteration reads the rows again."""

    rows: RowSource
    root: Path
    """Base folder of relative media paths."""
    schema: Schema
    """Schema of the rows."""
    limit: int | None = None
    """Number of records to read, from the first one. None: all."""

    @property
    def name(self) -> str:
        """Return the path or name given by the user, for messages."""
        return self.rows.name

    def __iter__(self) -> Iterator[Record]:
        """Yield all records in order; an unusable row gives a record with a problem."""
        return (record for _, record in self.iter_located())

    def iter_located(self) -> Iterator[tuple[str, Record]]:
        """Yield all records in order, each with its file and (first) row, for messages."""
        seen: set[bytes] = set()
        groups = itertools.islice(_group_rows(iter(self.rows), self.schema), self.limit)
        for index, rows in enumerate(groups):
            record = _make_record(self.schema, rows, self.root, index)
            digest = hashlib.blake2b(record.id.encode(), digest_size=16).digest()
            if digest in seen and not record.problem:
                problem = f"duplicate id: {rows[0].where} has id {record.id!r} of an earlier row"
                record = Record(record.id, record.prompt, (), problem=problem)
            seen.add(digest)
            yield rows[0].where, record

    def has_prompts(self) -> bool:
        """Return whether any of the first records has a prompt; then one without is an error."""
        return any(record.prompt.strip() for record in itertools.islice(self, _LOOKED_AT))

    def size(self) -> int | None:
        """Return the approximate number of records; None if counting would be slow."""
        return None if self.schema.group else self.rows.size()

    def identity(self) -> str:
        """Return a hash of the names of a folder's media, or the sizes and ends of other files.

        Changes inside the media, their prompts or middle rows are in `Record.stamp`.
        """
        return self.rows.identity()


def open_dataset(
    source: Source, schema: str = "auto", root: str | None = None, columns: Columns | None = None
) -> Dataset:
    """Open a dataset: files, a dataset of the Hub, a `datasets` object, or a list of dictionaries.

    A path is a folder of media, a folder saved by `datasets`, a table, a tar shard, or a pattern of
    files of one format, such as `shards/{000..012}.tar`. `columns` gives flowalign's names to
    columns: `{"chosen": "winner", "rejected": "loser"}`, or `{"images": ["left", "right"]}`.

    `schema="auto"` detects the schema from the columns. Relative paths start at `root`, or at the
    folder of the file if `root` is None.

    Raises:
        ValueError: The dataset does not exist or has no row, it lacks a column, its schema is
            unknown, or several schemas fit.
    """
    require_known("schema is", [schema], ("auto", *SCHEMAS))
    if root is not None and not Path(root).is_dir():
        raise ValueError(f"the folder of the media, {root!r}, does not exist")
    own = split_names(SCHEMAS[schema].columns) if schema != "auto" else ()
    rows = open_rows(source, columns, NAMES.union(own))
    there = rows.columns()
    schemas = TRAINING if columns else tuple(SCHEMAS.values())
    chosen = _detect(rows.name, there, schemas) if schema == "auto" else SCHEMAS[schema]
    if chosen.missing(there):
        needs = f"schema {chosen.name} needs the columns {', '.join(chosen.missing())}"
        raise ValueError(f"{needs};\n{rows.name} has {', '.join(sorted(there))}")
    return Dataset(rows, Path(root) if root else rows.root, chosen)


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


def _detect(name: str, columns: frozenset[str], schemas: Sequence[Schema]) -> Schema:
    """Return the only published schema that fits the columns, else the generic schema.

    A schema that needs all columns of another schema, and more, takes precedence over it.
    """
    found = [schema for schema in schemas if not schema.missing(columns)]
    needed = [set(schema.missing()) for schema in found]
    narrower = [schema for schema in found if any(set(schema.missing()) < one for one in needed)]
    published = [s for s in found if s is not GENERIC and s not in narrower]
    if len(published) > 1:
        names = ", ".join(schema.name for schema in published)
        raise ValueError(f"{name} fits several schemas: {names}; choose one with --schema")
    if not found:
        near = min(schemas, key=lambda schema: len(schema.missing(columns)))
        names = near.missing(columns)[0].split("|")
        wanted = "image" if "image" in names else names[0]
        raise ValueError(
            f"no schema fits the columns {', '.join(sorted(columns))} of {name};\n{near.name} "
            f"lacks {', '.join(near.missing(columns))}: map a column, such as "
            f"--columns {wanted}={min(columns - NAMES or columns)}"
        )
    return (published or found)[0]

"""Read the rows of a JSONL, JSON, CSV, parquet, Arrow or tar file as a stream."""

import codecs
import csv
import itertools
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TextIO

from flowalign.utils.errors import explain_errors
from flowalign.utils.files import parse_json
from flowalign.utils.imports import import_optional
from flowalign.utils.media.media import PICTURES, VIDEOS

_CHARACTERS_AT_ONCE = 1 << 16
_KEY, _SCALAR = r'"[^"\\]*"\s*:\s*', r'(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)'
_LIST = re.compile(rf"\s*(?:\{{\s*(?:{_KEY}{_SCALAR}\s*,\s*)*{_KEY})?\[")
"""Pattern of the beginning of the list in a JSON file of rows; single values may come before it."""
_MEMORY = 1 << 28
"""Bytes of the rows of a table in memory; a small file can hold much more."""
_REPEATS = 4
_LARGEST_COLUMN, _LARGEST_RATIO = 1 << 30, 100
"""Bytes of a column of a row group, and their ratio to the stored ones; above both, the file is no
data set, but would fill memory."""
ROWS_AT_ONCE = 64
"""Number of rows that are in memory at a time."""


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

    def get_fields(self) -> Mapping[str, Any]:
        """Return the fields; raise ValueError if the row could not be read."""
        if self.problem:
            raise ValueError(f"{self.where} {self.problem}")
        return self.fields


def decode_text(content: bytes) -> str:
    """Return a text in UTF-8, or in UTF-16 with a byte order mark, without its mark."""
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if marked else "utf-8-sig")


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield one object per line; blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse_line(number, path, line)


def _parse_line(number: int, path: Path, line: str | bytes) -> Row:
    try:
        item = parse_json(line)
    except ValueError as error:  # neither UTF-8 nor JSON
        return Row(number, path, problem=f"is not JSON ({error})")
    if not isinstance(item, dict):
        return Row(number, path, problem="is not a JSON object")
    return Row(number, path, item)


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Open a text in UTF-8; raise ValueError with its name for other encodings."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not text in UTF-8: {error}") from error


def read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list without loading the whole list.

    The list may be the first value of an object, as in `{"pairs": [...]}`.

    Raises:
        ValueError: The file is not a JSON list, or is truncated.
    """
    for number, item in enumerate(_iterate_items(path), 1):
        yield _parse_line(number, path, item)


def _iterate_items(path: Path) -> Iterator[str]:
    """Yield the texts of the items of a JSON list; read on where the buffer ends in an item."""
    decoder, at_end = json.JSONDecoder(parse_int=str), False
    with _open_text(path) as file:
        text = file.read(_CHARACTERS_AT_ONCE)
        if not (start := _LIST.match(text)):
            hint = "; rename it to .jsonl if it has one object per line" if "}" in text else ""
            raise ValueError(f"{path} is not a JSON list of rows{hint}")
        text = text[start.end() :]
        while not (text := text.lstrip().removeprefix(",").lstrip()).startswith("]"):
            try:
                _, end = decoder.raw_decode(text)
            except RecursionError as error:
                raise ValueError(f"{path} is nested too deep: {text[:40]!r}") from error
            except json.JSONDecodeError as error:
                if at_end:
                    raise ValueError(f"{path} is truncated or not JSON: {error}") from error
                more = file.read(max(_CHARACTERS_AT_ONCE, len(text)))
                text, at_end = text + more, not more
            else:
                yield text[:end]
                text = text[end:]
        _check_rest(path, (text[1:] + file.read()).strip(), "{" in start[0])


def _check_rest(path: Path, rest: str, is_in_object: bool) -> None:
    """Raise ValueError unless only single values of the object follow its list of rows."""
    try:
        others = parse_json("{" + rest.removeprefix(",")) if is_in_object else {}
    except ValueError:
        others, is_in_object = {}, False
    if lists := [name for name, value in others.items() if isinstance(value, list | dict)]:
        raise ValueError(f"{path} also holds {', '.join(lists)}; put each list in its own file")
    if rest and not is_in_object:
        raise ValueError(f"{path} has more after its list of rows: {rest[:40]!r}")


def read_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """Yield one row per line of a CSV file; cells are texts, and empty cells are absent."""
    csv.field_size_limit(1 << 30)
    with _open_text(path) as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
            if repeated := sorted({name for name in header if header.count(name) > 1}):
                raise ValueError(f"{path} has several columns named {', '.join(repeated)}")
            for number, cells in enumerate(filter(None, rows), 1):
                if len(cells) != len(header):
                    yield Row(number, path, problem="has more or fewer cells than the header")
                else:  # pandas writes its index in a column without a name
                    named = zip(header, cells, strict=True)
                    yield Row(number, path, {name: cell for name, cell in named if name and cell})
        except csv.Error as error:
            remedy = f'({error}); write a quote inside a quoted cell as ""'
            raise ValueError(f"{path} line {rows.line_num} has a wrong quote {remedy}") from error


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file, with only a few rows in memory at a time."""
    pyarrow = import_optional("pyarrow", "data")
    parquet = import_optional("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:  # else holds the whole file
            yield from number_rows(path, file.iter_batches(_fit_rows(file.metadata)))
    except pyarrow.ArrowMemoryError:
        raise  # also an ArrowException
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a parquet file: {error}") from error


def _fit_rows(metadata: Any) -> int:
    """Return a number of rows that fits memory.

    A column of equal values is stored once, however often it is read. So in columns that unpack to
    much more than they store, each row may hold all of the column.
    """
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    columns = (group.column(i) for group in groups for i in range(group.num_columns))
    largest = 1
    for column in columns:
        stored, unpacked = column.total_compressed_size, column.total_uncompressed_size
        if unpacked > max(_LARGEST_COLUMN, _LARGEST_RATIO * stored):
            sizes = f"from {stored} to {unpacked} bytes"
            raise ValueError(f"its column {column.path_in_schema} unpacks {sizes}")
        repeats = unpacked > _REPEATS * stored
        largest = max(largest, unpacked if repeats else unpacked // max(column.num_values, 1))
    return max(1, min(ROWS_AT_ONCE, _MEMORY // largest))


def read_arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow stream, the file format of `datasets.save_to_disk`."""
    pyarrow = import_optional("pyarrow", "data")
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            slices = (
                batch.slice(start, ROWS_AT_ONCE)
                for batch in stream
                for start in range(0, len(batch), ROWS_AT_ONCE)
            )
            yield from number_rows(path, slices)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is truncated or not an Arrow stream: {error}") from error


def number_rows(path: Path, batches: Iterable[Any]) -> Iterator[Row]:
    """Yield the rows of Arrow batches, without times, which records cannot hold."""
    rows = (row for batch in batches for row in _convert_batch(path, batch))
    return (replace(row, number=number) for number, row in enumerate(rows, 1))


def _convert_batch(path: Path, batch: Any) -> Iterator[Row]:
    batch = batch.select([column.name for column in batch.schema if not _is_time(column.type)])
    try:
        yield from [Row(0, path, fields) for fields in batch.to_pylist()]
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            is_text = isinstance(error, UnicodeDecodeError)
            problem = "holds text that is not UTF-8" if is_text else "holds an unreadable value"
            yield Row(0, path, problem=f"{problem} ({error})")
        else:
            for start in range(len(batch)):
                yield from _convert_batch(path, batch.slice(start, 1))


def _is_time(kind: Any) -> bool:
    from pyarrow import types

    return types.is_temporal(kind)


# Tar files in the layout of webdataset ------------------------------------------------------------

_LARGEST_SAMPLE = 1 << 30
"""Bytes of a sample; a small file can unpack to much more."""
_BLOCK = 512
"""Bytes per block of a tar file; the file ends with blocks of zeros."""
_MEMBERS = {"txt": "prompt", "caption": "prompt"}
_MEMBERS |= {kind[1:]: "image" for kind in PICTURES} | {kind[1:]: "video" for kind in VIDEOS}
"""Columns of members by extension; `a.chosen.png` has the column `chosen`."""
_Member = tuple[str, str, bytes | str]
"""Sample, extension, and the content or the reason why there is none."""


def read_tar(path: Path) -> Iterator[Row]:
    """Yield a row per sample: adjacent members with equal names up to the first dot.

    An image, video or text member is a column. The entries of a `.json` member are columns unless
    another member has the same column. Members of other types are skipped.

    Raises:
        ValueError: The file is not a tar file, or is truncated.
    """
    samples = itertools.groupby(_iterate_members(path), lambda member: member[0])
    seen: set[int] = set()  # hashes take less memory than names
    for number, (key, members) in enumerate(samples, 1):
        if hash(key) in seen:
            remedy = "sort them by name (tar --sort=name) and remove copies"
            raise ValueError(f"{path} holds the files of sample {key!r} apart, or twice; {remedy}")
        seen.add(hash(key))
        try:
            yield Row(number, path, {"id": f"{path.stem}/{key}", **_collect_fields(members)})
        except RowProblem as problem:
            yield Row(number, path, problem=f"({key}) {problem}")


def _iterate_members(path: Path) -> Iterator[_Member]:
    """Yield the sample, the extension and the content of every member, with a limit per sample."""
    key, total = "", 0
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file) as archive:
            for member in archive:
                vars(archive)["members"].clear()  # tarfile keeps all headers: too many in a shard
                place = PurePosixPath(member.name)
                stem, dot, extension = place.name.partition(".")
                if stem and dot and not member.isdir():
                    before, key = key, str(place.with_name(stem))
                    total = member.size + (total if key == before else 0)
                    yield key, extension, _read_member(archive, member, extension, total)
            if archive.fileobj is file:  # the decompressor detects a truncated compressed file
                _check_end(file, archive.offset)
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is truncated or not a tar file: {error}") from error


def _read_member(archive: Any, member: Any, extension: str, total: int) -> bytes | str:
    if total > _LARGEST_SAMPLE:
        return f"has more than {_LARGEST_SAMPLE >> 20} MiB"
    content = archive.extractfile(member) if member.isfile() else None
    return content.read() if content else f"has a link instead of its .{extension} file"


def _check_end(file: BinaryIO, end: int) -> None:
    """Raise ReadError for a truncated header, which tarfile accepts as the end of the file."""
    file.seek(end)
    if file.read(_BLOCK).strip(b"\0"):
        raise tarfile.ReadError("unexpected end of data")


def _collect_fields(members: Iterable[_Member]) -> dict[str, Any]:
    fields, entries = dict[str, Any](), dict[str, Any]()
    for _, extension, content in members:
        name, _, kind = extension.lower().rpartition(".")
        if kind == "json" and not name:
            found = _parse_value(kind, _require_content(content))
            if not isinstance(found, dict):
                raise RowProblem("has a .json file that is not a JSON object")
            entries |= found
        elif kind == "json" or kind in _MEMBERS:
            column = name or _MEMBERS[kind]
            if column in fields:
                hint = f": a sample's name ends at its first dot, and .{extension} follows it"
                raise RowProblem(f"has two files for the column {column}{hint if name else ''}")
            fields[column] = _parse_value(kind, _require_content(content))
    return entries | fields


def _require_content(content: bytes | str) -> bytes:
    if isinstance(content, str):
        raise RowProblem(content)
    return content


def _parse_value(kind: str, content: bytes) -> Any:
    """Return the text of a text file, the value of a JSON file, or the bytes of other files."""
    with explain_errors(f"has a .{kind} file that cannot be read", to=RowProblem):
        if kind == "json":
            return parse_json(content)
        return decode_text(content).strip() if _MEMBERS[kind] == "prompt" else content

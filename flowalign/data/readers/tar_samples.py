"""Read the samples of a tar file in the layout of webdataset as a stream of rows."""

import itertools
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from flowalign.data.media.media import PICTURES, VIDEOS
from flowalign.data.readers.formats import Row, RowProblem, decode_text
from flowalign.utils.files import parse_json

_LARGEST = 1 << 30
"""Bytes of a sample; a small file can unpack to much more."""
_BLOCK = 512
"""Bytes per block of a tar file; the file ends with blocks of zeros."""
_COLUMNS = {"txt": "prompt", "caption": "prompt"}
_COLUMNS |= {kind[1:]: "image" for kind in PICTURES} | {kind[1:]: "video" for kind in VIDEOS}
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
            raise ValueError(
                f"{path} holds the files of sample {key!r} apart, or twice; "
                "sort them by name (tar --sort=name) and remove copies"
            )
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
    if total > _LARGEST:
        return f"has more than {_LARGEST >> 20} MiB"
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
        elif kind == "json" or kind in _COLUMNS:
            column = name or _COLUMNS[kind]
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
    try:
        if kind == "json":
            return parse_json(content)
        return decode_text(content).strip() if _COLUMNS[kind] == "prompt" else content
    except ValueError as error:
        raise RowProblem(f"has a .{kind} file that cannot be read ({error})") from error

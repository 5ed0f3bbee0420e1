"""Read requests, and order them by a pure function of the seed.

Requests are a text file with one prompt per line, JSONL or a table with a column `prompt`, a
dataset, or a list in Python. A row may have an image or clip as `image`, several as `images` or
`references`, and a `mask`. Paths are relative to the file. The remaining fields are metadata for
rewards.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowalign.data.media.media import MediaProblem
from flowalign.data.media_record import read_reference
from flowalign.data.readers.formats import Row, RowProblem
from flowalign.data.readers.schema import REQUEST_MASK, Fields
from flowalign.data.readers.sources import (
    Columns,
    FileRows,
    RowSource,
    Source,
    open_rows,
    parse_columns,
)
from flowalign.types import PromptConditioning, Reference, Request
from flowalign.utils.files import bundled, parse_json
from flowalign.utils.live_objects import find_object

_REFERENCES = ("image", "images", "references")
"""Alternative fields for the images or clips of a row."""
_MASKS = ("mask", REQUEST_MASK)
"""Alternative fields for the mask of a row; the second is used in folders of samples."""
_TABLES = (".json", ".csv", ".tsv", ".parquet")
_LINES = (".jsonl", ".ndjson")
_TEXTS = (".txt", "")


@dataclass(frozen=True)
class Requests:
    """List of requests, drawn in a new random order each epoch."""

    all: Sequence[Request]
    seed: int = 0
    conditioning: PromptConditioning | None = None
    """Words or users added to the policy's prompts. None: plain prompts."""

    def batch(self, step: int, size: int) -> list[Request]:
        """Return the requests of one step, which depend on the seed but not on resuming."""
        return [self._at(i) for i in range(step * size, (step + 1) * size)]

    def _at(self, position: int) -> Request:
        epoch, offset = divmod(position, len(self.all))
        request = self.all[_shuffle(self.seed, epoch, len(self.all))[offset]]
        return self.conditioning.for_rollout(request, position) if self.conditioning else request


@lru_cache(maxsize=4)
def _shuffle(seed: int, epoch: int, num_requests: int) -> list[int]:
    order = list(range(num_requests))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def read_requests(source: Source, columns: Columns | None = None) -> list[Request]:
    """Read requests from a file, a dataset, or a list of prompts, dictionaries or requests.

    A file is text with one prompt per line, JSONL or a table; blank lines are skipped. `columns`
    gives flowalign's names to columns, such as `{"prompt": "caption"}`. A path may end with them:
    `captions.csv:caption`, or `edits.csv:prompt=instruction,image=source`.

    Raises:
        ValueError: The source is missing or empty or of another kind, or a row has no prompt or
            names missing files.
    """
    return [request for _, request in read_located_requests(source, columns)]


def read_located_requests(
    source: Source, columns: Columns | None = None
) -> list[tuple[str, Request]]:
    """Read requests like `read_requests`, each with its file and line for messages.

    Raises:
        ValueError: For the same reasons as `read_requests`.
    """
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if path is not None and not columns and (named := _split_columns(path)):
        source, columns = named
    if path is not None and not columns and not path.startswith("hub:"):
        return _read_file(path)
    if path is None and not columns and isinstance(source, Sequence):
        prompts = [_read_prompt(i, entry) for i, entry in enumerate(source)]
        if prompts and None not in prompts:
            return [entry for entry in prompts if entry is not None]
    return _read_rows(open_rows(source, columns))


def _split_columns(path: str) -> tuple[str, Columns] | None:
    """Return file and columns of `FILE:COLUMN` or `FILE:NAME=COLUMN,...`; None for other paths."""
    name, colon, text = path.rpartition(":")
    if not (colon and text and Path(bundled(name)).is_file()) or Path(bundled(path)).exists():
        return None
    pairs = text.split(",") if "=" in text else [f"prompt={text}"]
    return bundled(name), parse_columns(pairs) or {}


def _read_prompt(index: int, entry: Any) -> tuple[str, Request] | None:
    """Return the request of an entry of a list; None for a row with columns."""
    where = f"prompts[{index}]"
    if isinstance(entry, Request):
        return where, entry
    if not isinstance(entry, str):
        return None
    if not entry.strip():
        raise ValueError(f"{where} is {entry!r}; expected a prompt")
    return where, Request(entry)


def _read_file(path: str) -> list[tuple[str, Request]]:
    if (known := find_object(path)) is not None:
        return known
    file = Path(bundled(path))
    if file.is_fifo():
        raise ValueError(f"prompts file {path!r} is a pipe, which can be read once only")
    if not file.is_file():
        raise ValueError(f"prompts file {path!r} does not exist (looked in {Path.cwd()})")
    kind = file.suffix.lower()
    if kind in _TABLES:
        return _read_rows(FileRows([file], path))
    if kind not in (*_LINES, *_TEXTS):
        tables = ", ".join((*_LINES, *_TABLES))
        raise ValueError(
            f"prompts file {path!r} must be text with one prompt per line (.txt or no ending), or\n"
            f"rows with a column `prompt` ({tables}): got {kind}. Rename or convert it"
        )
    stamp = (file.stat().st_mtime_ns, file.stat().st_size)
    if kind in _TEXTS:
        return [*_read_text(path, file, stamp)]
    rows = _read_json_lines(path, file, stamp)
    return [(where, _parse_request(row, file.parent, where)) for where, row in rows]


@lru_cache(maxsize=8)
def _read_text(
    path: str,
    file: Path,
    stamp: tuple[int, int],  # noqa: ARG001 (a changed file is read again)
) -> tuple[tuple[str, Request], ...]:
    """Return the prompts of a text file, which checks, plans and loops of a run read in turn."""
    lines = _split_lines(_decode_text(file.read_bytes(), path), path)
    if _is_object(lines[0][1]):
        raise ValueError(f"{path}:{lines[0][0]} is a JSON object: rename the file to .jsonl")
    return tuple(_parse_requests(lines, path, file.parent, is_jsonl=False))


@lru_cache(maxsize=8)
def _read_json_lines(
    path: str,
    file: Path,
    stamp: tuple[int, int],  # noqa: ARG001 (a changed file is read again)
) -> tuple[tuple[str, Any], ...]:
    """Return the rows of a JSONL file; references may change, so no requests."""
    lines = _split_lines(_decode_text(file.read_bytes(), path), path)
    return tuple((f"{path}:{n}", _parse_json(line, f"{path}:{n}")) for n, line in lines)


def read_located_requests_once(source: str) -> list[tuple[str, Request]]:
    """Read requests like `read_located_requests`, also from a pipe, or stdin if `-`.

    A stream is read as JSONL if its first line is a JSON object. Its paths are relative to the
    working directory.

    Raises:
        ValueError: For the same reasons as `read_requests`.
    """
    path = Path(source)
    device = source.startswith("/dev/") and path.exists()
    if not (source == "-" or device or path.is_fifo()):
        return read_located_requests(source)
    with contextlib.nullcontext(sys.stdin.buffer) if source == "-" else path.open("rb") as stream:
        text = _decode_text(stream.read(), source)
    lines = _split_lines(text, source)
    return _parse_requests(lines, source, Path(), is_jsonl=_is_object(lines[0][1]))


def locate_prompts(option: str, prompts: Sequence[str]) -> list[tuple[str, Request]]:
    """Return requests of plain prompts, each with the option that gave it, for messages."""
    return [(f"{option} {prompt!r}", Request(prompt)) for prompt in prompts]


def hash_requests(requests: Sequence[Request]) -> str:
    """Return a hash of the requests; for plain prompts, a hash of their texts."""
    plain = not any(request.references or request.mask for request in requests)
    inputs = [request.prompt if plain else request.input_digest.hex() for request in requests]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _decode_text(content: bytes, path: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts file {path!r} is not text in UTF-8: {error}") from error


def _read_rows(rows: RowSource) -> list[tuple[str, Request]]:
    """Read the rows of a table or dataset; null and empty cells count as absent."""
    found = []
    for row in rows:
        where, fields = f"{rows.name} row {row.number}", Fields(row, rows.root)
        if row.problem:
            raise ValueError(f"{where} {row.problem}")
        media = {name: row.fields[name] for name in (*_REFERENCES, *_MASKS) if name in fields}
        found.append((where, _parse_request(fields.rest() | media, rows.root, where)))
    if not found:
        raise ValueError(f"{rows.name!r} holds no prompt")
    return found


def _split_lines(text: str, path: str) -> list[tuple[int, str]]:
    """Return the non-blank lines with their numbers.

    Only line feeds end lines: prompts may contain characters such as U+2028.
    """
    lines = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1)]
    if not (lines := [(n, line) for n, line in lines if line]):
        raise ValueError(f"prompts file {path!r} holds no prompt")
    return lines


def _parse_requests(
    lines: Sequence[tuple[int, str]], path: str, folder: Path, is_jsonl: bool
) -> list[tuple[str, Request]]:
    if not is_jsonl:
        return [(f"{path}:{n}", Request(line)) for n, line in lines]
    rows = [(f"{path}:{n}", line) for n, line in lines]
    return [
        (where, _parse_request(_parse_json(line, where), folder, where)) for where, line in rows
    ]


def _parse_request(row: Any, folder: Path, where: str) -> Request:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        texts = (
            [name for name in row if isinstance(row[name], str)] if isinstance(row, dict) else []
        )
        name = re.split(r"(?: row |:)\d+$", where)[0]
        hint = f"\nname the column of the prompts, such as {name}:{texts[0]}" if texts else ""
        raise ValueError(
            f"{where}: expected an object with a text field 'prompt', got {row!s:.60}{hint}"
        )
    named = [name for name in _REFERENCES if name in row]
    if len(named) > 1:
        raise ValueError(f"{where}: give one of {' and '.join(named)}, not both")
    references = _open_references(row, named[0], folder, where) if named else []
    masked = [name for name in _MASKS if name in row]
    masks = _open_references(row, masked[0], folder, where, "black") if masked else []
    if len(masks) > 1 or len(masked) > 1:
        raise ValueError(f"{where}: mask must be one path, got {max(len(masks), len(masked))}")
    return Request(
        prompt,
        tuple(references),
        masks[0] if masks else None,
        {name: value for name, value in row.items() if name not in ("prompt", *masked, *named)},
    )


def _open_references(
    row: Mapping[str, Any], name: str, folder: Path, where: str, background: str = "white"
) -> list[Reference]:
    """Open the files or images of a column, which holds one or a list of them."""
    fields, value = Fields(Row(0, Path(), row), folder), row[name]
    try:
        media = fields.media(name) if isinstance(value, list) else [fields.medium(name)]
        return [read_reference(replace(medium, background=background)) for medium in media]
    except (RowProblem, MediaProblem, OSError) as problem:
        raise ValueError(f"{where}: {problem}") from problem


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _parse_json(line: str, where: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error

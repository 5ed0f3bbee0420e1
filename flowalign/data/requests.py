"""Read requests, and order them by a pure function of the seed.

Requests are a text file with one prompt per line, JSONL or a table with a column `prompt`, a
dataset, or a list in Python. A row may have an image or clip as `image`, several as `images` or
`references`, and a `mask`. Paths are relative to the file. The remaining fields are metadata for
rewards.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

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
from flowalign.utils.errors import explain_errors
from flowalign.utils.files import bundled, parse_json
from flowalign.utils.live_objects import find_object
from flowalign.utils.media.media import MediaProblem
from flowalign.utils.seeds import shuffle

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
        request = self.all[shuffle(f"{self.seed}:{epoch}", len(self.all))[offset]]
        return self.conditioning.for_rollout(request, position) if self.conditioning else request


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
        prompts = [*filter(None, map(_read_prompt, itertools.count(), source))]
        if prompts and len(prompts) == len(source):
            return prompts
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
    return _make_requests(_read_lines(path, file, stamp), file.parent)


@lru_cache(maxsize=8)
def _read_lines(
    path: str,
    file: Path,
    stamp: tuple[int, int],  # noqa: ARG001 (a changed file is read again)
) -> Sequence[tuple[str, Any]]:
    """Return the lines of a file, which checks, plans and loops of a run read in turn."""
    return _parse_lines(file.read_bytes(), path, is_jsonl=file.suffix.lower() in _LINES)


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
        return _make_requests(_parse_lines(stream.read(), source, is_jsonl=None), Path())


def locate_prompts(option: str, prompts: Sequence[str]) -> list[tuple[str, Request]]:
    """Return requests of plain prompts, each with the option that gave it, for messages."""
    return [(f"{option} {prompt!r}", Request(prompt)) for prompt in prompts]


def hash_requests(requests: Sequence[Request]) -> str:
    """Return a hash of the requests; for plain prompts, a hash of their texts."""
    plain = not any(request.references or request.mask for request in requests)
    inputs = [request.prompt if plain else request.input_digest.hex() for request in requests]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


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


def _parse_lines(content: bytes, path: str, is_jsonl: bool | None) -> list[tuple[str, Any]]:
    """Return the request of each line of a text, or the value of each line of JSONL.

    Only line feeds end lines: prompts may contain characters such as U+2028. With `is_jsonl` None,
    the first line decides. Files of references may change, so values of JSONL are no requests yet.
    """
    with explain_errors(f"prompts file {path!r} is not text in UTF-8"):
        text = content.decode("utf-8-sig")
    lines = [(f"{path}:{n}", line.strip()) for n, line in enumerate(text.split("\n"), 1)]
    if not (lines := [(where, line) for where, line in lines if line]):
        raise ValueError(f"prompts file {path!r} holds no prompt")
    if not is_jsonl and _is_object(lines[0][1]):
        if is_jsonl is False:
            raise ValueError(f"{lines[0][0]} is a JSON object: rename the file to .jsonl")
        is_jsonl = True
    if is_jsonl:
        return [(where, _parse_json(line, where)) for where, line in lines]
    return [(where, Request(line)) for where, line in lines]


def _make_requests(lines: Iterable[tuple[str, Any]], folder: Path) -> list[tuple[str, Request]]:
    """Return the requests of the lines of a file in `folder`."""
    return [
        (where, row if isinstance(row, Request) else _parse_request(row, folder, where))
        for where, row in lines
    ]


def _parse_request(row: Any, folder: Path, where: str) -> Request:
    fields = row if isinstance(row, dict) else {}
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        texts = [name for name, value in fields.items() if isinstance(value, str)]
        name = re.split(r"(?: row |:)\d+$", where)[0]
        hint = f"\nname the column of the prompts, such as {name}:{texts[0]}" if texts else ""
        raise ValueError(
            f"{where}: expected an object with a text field 'prompt', got {row!s:.60}{hint}"
        )
    named, masked = ([n for n in names if n in fields] for names in (_REFERENCES, _MASKS))
    for names in (named, masked):
        if len(names) > 1:
            raise ValueError(f"{where}: give one of {' and '.join(names)}, not both")
    references = [one for n in named for one in _open_references(row, n, folder, where)]
    masks = [one for n in masked for one in _open_references(row, n, folder, where, "black")]
    if len(masks) > 1:
        raise ValueError(f"{where}: mask must be one path, got {len(masks)}")
    used = ("prompt", *masked, *named)
    metadata = {name: value for name, value in fields.items() if name not in used}
    return Request(prompt, tuple(references), masks[0] if masks else None, metadata)


def _open_references(
    row: Mapping[str, Any], name: str, folder: Path, where: str, background: str = "white"
) -> list[Reference]:
    """Open the files or images of a column, which holds one or a list of them."""
    fields, value = Fields(Row(0, Path(), row), folder), row[name]
    with explain_errors(where, RowProblem, MediaProblem, OSError):
        media = fields.media(name) if isinstance(value, list) else [fields.medium(name)]
        return [read_reference(replace(medium, background=background)) for medium in media]


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _parse_json(line: str, where: str) -> Any:
    with explain_errors(f"{where}: not JSON"):
        return parse_json(line)

"""Read the prompt file of a benchmark, and check that it is the official one."""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.data.requests import read_requests
from flowalign.studies.benchmark.card import Card, PromptSource
from flowalign.types import Request
from flowalign.utils.files import bundled

_TABLES = {".csv": ",", ".tsv": "\t"}


def read_prompts(card: Card, data: str | None) -> list[Request]:
    """Return one request per row of the prompt file.

    `data` is a text file, JSONL, JSON, CSV or TSV, or a folder of text files with one prompt each.

    Raises:
        ValueError: The file is missing, cannot be read, or is not the one that the card describes.
    """
    source = card.prompts
    if data is None and not source.bundled:
        raise ValueError(
            f"{card.title} needs its prompt file: give --data FILE, where FILE is\n"
            f"{source.file} (licence: {source.licence})"
        )
    paths = [data] if data is not None else source.bundled
    requests = [request for path in paths for request in _read(Path(bundled(path)), path, source)]
    given = data or ", ".join(source.bundled)
    _check_checksum([Path(bundled(path)) for path in paths], source, given)
    for what, expected, found in (
        ("rows", source.rows, len(requests)),
        ("distinct prompts", source.distinct, len({r.input_digest for r in requests})),
    ):
        if expected not in (None, found):
            raise ValueError(
                f"{given} has {found} {what}; {card.title} has {expected}: {source.file}.\n"
                "For another set of prompts, change a copy of the card: --benchmark my_card.yaml"
            )
    return requests


def _check_checksum(paths: Sequence[Path], source: PromptSource, given: str) -> None:
    """Raise ValueError unless the SHA-256 of the files begins as the card says."""
    if source.sha256 is None:
        return
    found = hash_files(paths)
    if not found.startswith(source.sha256):
        raise ValueError(
            f"{given} has the SHA-256 {found[:16]}..., the card says {source.sha256}...:\n"
            f"it differs from {source.file}.\n"
            "For another set of prompts, change a copy of the card: --benchmark my_card.yaml"
        )


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a file; of several files or of a folder, that of all contents."""
    files = [file for path in paths for file in (_text_files(path) if path.is_dir() else [path])]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(path: Path, name: str, source: PromptSource) -> list[Request]:
    if path.is_dir():
        files = _text_files(path)
        return [Request(f.read_text("utf-8").strip(), metadata={"file": f.name}) for f in files]
    if path.suffix in _TABLES and path.is_file():
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream, delimiter=_TABLES[path.suffix]))
        return [_parse(row, f"{name}:{n}", source.column) for n, row in enumerate(rows, 2)]
    if path.suffix == ".json" and path.is_file():
        content = json.loads(path.read_text("utf-8"))
        rows = list(content.values()) if isinstance(content, dict) else content
        if not isinstance(rows, list):
            raise ValueError(f"{name} must hold a list of rows, got {type(rows).__name__}")
        return [_parse(row, f"{name}[{n}]", source.column) for n, row in enumerate(rows)]
    return read_requests(name)


def _text_files(folder: Path) -> list[Path]:
    """Return the text files of a folder in the order of their names."""
    if not (files := sorted(folder.glob("*.txt"))):
        raise ValueError(f"{folder} holds no .txt file with a prompt")
    return files


def _parse(row: Mapping[str, Any], where: str, column: str) -> Request:
    prompt = row.get(column) if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where}: expected a row with a text in column {column!r}")
    return Request(prompt, metadata={k: v for k, v in row.items() if k != column})

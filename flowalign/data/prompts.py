"""Reads prompts, and orders them by a pure function of the seed."""

import contextlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowalign.utils.files import bundled


@dataclass(frozen=True)
class Prompts:
    """Goes through a list of prompts, in a new random order each epoch."""

    texts: Sequence[str]
    seed: int = 0

    def batch(self, step: int, size: int) -> list[str]:
        """Return the prompts of one step; they depend on the seed, not on where a run resumed."""
        return [self._at(i) for i in range(step * size, (step + 1) * size)]

    def _at(self, position: int) -> str:
        epoch, offset = divmod(position, len(self.texts))
        return self.texts[_order(self.seed, epoch, len(self.texts))[offset]]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_prompts: int) -> list[int]:
    order = list(range(num_prompts))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def read_prompts(path: str) -> list[str]:
    """Read prompts from a text file (one a line) or JSONL (field `prompt`); skip blank lines.

    Raises:
        ValueError: The file is missing, empty, or a line holds no prompt.
    """
    return [row["prompt"] for row in _rows(path)]


def read_metadata(path: str) -> dict[str, dict[str, Any]]:
    """Read the further fields of each prompt of a JSONL file, for rewards that use them.

    Raises:
        ValueError: `read_prompts` would raise, or two lines give one prompt different fields.
    """
    known: dict[str, dict[str, Any]] = {}
    for row in _rows(path):
        fields = {name: value for name, value in row.items() if name != "prompt"}
        if known.setdefault(row["prompt"], fields) != fields:
            raise ValueError(f"{path}: prompt {row['prompt']!r} occurs with different fields")
    return known if any(known.values()) else {}


def read_prompts_once(source: str) -> list[str]:
    """Read prompts like `read_prompts`, also from a pipe or, if the source is `-`, standard input.

    A stream has no name that says its kind: it is JSONL if its first line is such a row.

    Raises:
        ValueError: `read_prompts` would raise.
    """
    path = Path(source)
    device = source.startswith("/dev/") and path.exists()
    if not (source == "-" or device or path.is_fifo()):
        return read_prompts(source)
    with contextlib.nullcontext(sys.stdin.buffer) if source == "-" else path.open("rb") as stream:
        text = _decoded(stream.read(), source)
    lines = _lines(text, source)
    rows = _json_rows(lines, source) if _is_row(lines[0][1]) else _text_rows(lines)
    return [row["prompt"] for row in rows]


def _rows(path: str) -> list[dict[str, Any]]:
    file = Path(bundled(path))
    if file.is_fifo():
        raise ValueError(f"prompts file {path!r} is a pipe, which can be read once only")
    if not file.is_file():
        raise ValueError(f"prompts file {path!r} does not exist (looked in {Path.cwd()})")
    lines = _lines(_decoded(file.read_bytes(), path), path)
    return _json_rows(lines, path) if file.suffix == ".jsonl" else _text_rows(lines)


def _decoded(content: bytes, path: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts file {path!r} is not text in UTF-8: {error}") from error


def _lines(text: str, path: str) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    if not (lines := [(n, line) for n, line in lines if line]):
        raise ValueError(f"prompts file {path!r} holds no prompt")
    return lines


def _text_rows(lines: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"prompt": line} for _, line in lines]


def _json_rows(lines: Sequence[tuple[int, str]], path: str) -> list[dict[str, Any]]:
    return [_row(line, f"{path}:{n}") for n, line in lines]


def _is_row(line: str) -> bool:
    try:
        _row(line, "")
    except ValueError:
        return False
    return True


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where}: expected an object with a text field 'prompt', got {line[:60]}")
    return row

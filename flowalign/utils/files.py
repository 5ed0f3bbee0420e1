"""Locate files that come with the package, and write files atomically."""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

_LONG_NUMBER = re.compile(r"\d{309}")
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
GRID_PADDING = 2
"""Pixels around every image of a grid file, at which reports cut the grid into its images again."""


def bundled(path: str) -> str:
    """Return the path if it exists, else the package's copy of `assets/...` or `configs/...`."""
    if os.path.exists(path) or not path.startswith(("assets/", "configs/")):
        return path
    here = Path(__file__).parents[1]
    for root in (here / "bundled", here.parent):
        if (root / path).exists():
            return str(root / path)
    return path


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that readers never see a partial file."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: It is no JSON, nested too deep, or holds numbers that no float can hold, or
            characters that no file can hold: NUL and half of a character.
    """
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    try:
        value = json.loads(text, parse_int=_parse_int if _LONG_NUMBER.search(text) else None)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if "\\u0000" in text or "\\ud" in text.replace("D", "d"):
        content = json.dumps(value, ensure_ascii=False)
        if any("\ud800" <= character <= "\udfff" for character in content):
            raise ValueError("has half of a character (a lone surrogate)")
        if _NUL.search(content):
            raise ValueError("has a NUL character")
    return value


def _parse_int(digits: str) -> int:
    if _LONG_NUMBER.search(digits):
        raise ValueError(f"has a number of {len(digits)} digits")
    return int(digits)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raise ValueError with the file's name if it holds none."""
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # invalid JSON or UTF-8
        raise ValueError(f"{path} is damaged: {error}") from error


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield file and line, and the object of every line that is not blank.

    Raises:
        ValueError: A line holds no JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: expected a JSON object, got {str(row)[:40]}")
            yield f"{path}:{number}", row


@contextmanager
def explain_shape(path: Path, remedy: str) -> Iterator[None]:
    """Raise ValueError with a remedy if the block finds a stored value of another shape."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__} {error}): {remedy}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError with the file's name if it holds none."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected an object, got {str(content)[:40]}")
    return content


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; non-finite numbers become null, because JSON has no NaN."""
    write_text(path, to_json(content, indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically; a file that exists is complete, also after a crash."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    with atomic_write(path) as partial:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        sync_file(partial)  # the rename must not reach the disk before the rows


def to_json(content: Any, indent: int | None = None) -> str:
    """Return content as JSON, with null for non-finite numbers."""
    return json.dumps(_replace_nonfinite(content), indent=indent, allow_nan=False)


def _replace_nonfinite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _replace_nonfinite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replace_nonfinite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits; an unchanged file is read once."""
    about = path.stat()
    return _digest(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _digest(path: Path, _size: int, _modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Write a file, or the entries of a folder, from the system's cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write a folder with all files and folders below it to the disk."""
    for path in (*folder.rglob("*"), folder):
        sync_file(path)


@contextmanager
def atomic_write(path: Path, alone: bool = False) -> Iterator[Path]:
    """Yield a temporary file or folder, renamed to `path` at the end and removed on failure.

    Its name contains the process id, so if several processes write the same path, the last one
    wins. With `alone`, for paths that no other process writes, the name has no id, and the next run
    overwrites a file that a killed run left.
    """
    partial = path.with_name(f".{path.name}{'' if alone else f'.{os.getpid()}'}.tmp")
    try:
        yield partial
        partial.replace(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)

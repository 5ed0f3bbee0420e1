"""Locate files that come with the package, and write files atomically."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    """Write to a temporary file and rename it, so that a reader never finds half a file."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; numbers that are not finite become null, since JSON has no NaN."""
    write_text(path, json.dumps(_replace_nonfinite(content), indent=1, allow_nan=False) + "\n")


def _replace_nonfinite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _replace_nonfinite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replace_nonfinite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def atomic_write(path: Path, alone: bool = False) -> Iterator[Path]:
    """Yield a temporary file or folder, renamed to `path` at the end and removed on failure.

    Its name holds the process id: if several processes write the same path, the last one wins. With
    `alone`, for paths that no other process writes, it has no id, and the next run overwrites what
    a kill left.
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

"""Where files that come with the package lie, and how files are written."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def bundled(path: str) -> str:
    """The path where it exists; else, for `assets/...` and `configs/...`, the package's copy."""
    if os.path.exists(path) or not path.startswith(("assets/", "configs/")):
        return path
    here = Path(__file__).parents[1]
    for root in (here / "bundled", here.parent):
        if (root / path).exists():
            return str(root / path)
    return path


def write_text(path: Path, text: str) -> None:
    """Write aside and rename, so that a reader never finds half a file."""
    with aside(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def aside(path: Path, alone: bool = False) -> Iterator[Path]:
    """A file or folder to write to, which is renamed to `path` at the end; removed on failure.

    Its name holds the process's number: of several that write the same, the last one stays. Where
    nobody else writes it, `alone`, it has no number, and the next run overwrites what a kill left.
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

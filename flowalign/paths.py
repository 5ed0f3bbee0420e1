"""Where files that come with the package lie."""

import os
from pathlib import Path


def bundled(path: str) -> str:
    """The path where it exists; else, for `assets/...` and `configs/...`, the package's copy."""
    if os.path.exists(path) or not path.startswith(("assets/", "configs/")):
        return path
    here = Path(__file__).parent
    for root in (here / "bundled", here.parent):
        if (root / path).exists():
            return str(root / path)
    return path


def write_text(path: Path, text: str) -> None:
    """Write aside and rename, so that a reader never finds half a file."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text)
    partial.replace(path)

"""Write prompts that a script hands over, and read rows as columns."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.types import Reference, Request
from flowalign.utils.files import write_text
from flowalign.utils.media.encode import write_picture


def write_requests(file: Path, requests: Sequence[tuple[str, Request]]) -> None:
    """Write prompts as JSONL unless the file exists, and images that have no file next to it."""
    if not file.exists():
        rows = [_row(request, file.parent / "references") for _, request in requests]
        write_text(file, "".join(json.dumps(row, default=str) + "\n" for row in rows))


def _row(request: Request, folder: Path) -> Mapping[str, Any]:
    images = {"references": [_path(one, folder) for one in request.references]}
    mask = {"mask": _path(request.mask, folder)} if request.mask else {}
    row = {"prompt": request.prompt, **request.metadata}
    return row | mask | (images if request.references else {})


def _path(reference: Reference, folder: Path) -> str:
    """Return the path of a reference, which is written to `folder` if it is in memory."""
    if Path(reference.name).exists():
        return str(Path(reference.name).absolute())
    path = folder / f"{reference.digest[:16]}.png"
    folder.mkdir(parents=True, exist_ok=True)
    write_picture(path, reference.read()[0])
    return str(path.absolute())


def to_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns by name; None where a row has no such value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}

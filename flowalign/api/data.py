"""Read prompts that a script hands over, and write them into the run directory."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowalign.data.requests import read_located_requests
from flowalign.types import Request
from flowalign.utils.files import write_text

Located = list[tuple[str, Request]]
"""Requests with their place, for messages."""


def find_requests(prompts: Any) -> Located:
    """Return the requests of a file, a list of texts, or rows with a column `prompt`.

    Raises:
        ValueError: There is no prompt, or a row has none.
    """
    if isinstance(prompts, str | Path):
        return read_located_requests(str(prompts))
    if not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts is {type(prompts).__name__}; it must be a list of texts or rows, a file or a "
            "dataset"
        )
    found = [(f"prompts[{i}]", _request(one, i)) for i, one in enumerate(prompts)]
    if not found:
        raise ValueError("prompts is empty: give at least one text")
    return found


def _request(row: Any, i: int) -> Request:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
        columns = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(
            f"prompts[{i}] must be a text, or a row with a text in the column prompt; got {columns}"
        )
    return Request(row["prompt"], metadata={k: v for k, v in row.items() if k != "prompt"})


def write_requests(file: Path, requests: Located) -> None:
    """Write prompts as JSONL, unless the file exists."""
    rows = [{"prompt": one.prompt} | dict(one.metadata) for _, one in requests]
    if not file.exists():
        write_text(file, "".join(json.dumps(row, default=str) + "\n" for row in rows))

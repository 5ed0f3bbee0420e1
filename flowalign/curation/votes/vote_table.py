"""Store votes in a table of JSON lines that training and `flowalign pairs` read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowalign.data.media.media import Media
from flowalign.utils.files import atomic_write, sync_file

VOTES = "votes.jsonl"


class VoteTable:
    """Table of votes, one row per vote, which is on the disk before the vote is confirmed.

    A row is a record of schema `generic`: `prompt`, `images`, and `ranks` or `ratings`. It also has
    the `question`, the annotator as `user_id`, and whether the question was a `repeat`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # a kill during a write; that vote was not confirmed
            os.truncate(path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                self.rows[row["id"]] = row
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path} line {number} is no vote: {line[:60]!r}") from error

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, and wait until it is on the disk."""
        new = not self.path.exists()
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_file(self.path.parent)
        self.rows[row["id"]] = dict(row)

    def remove(self, id: str) -> None:
        """Delete a row; the file is replaced at once."""
        rows = {key: row for key, row in self.rows.items() if key != id}
        with atomic_write(self.path) as partial:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()]
            partial.write_text("".join(lines), encoding="utf-8")
            sync_file(partial)
        sync_file(self.path.parent)
        self.rows = rows

    def relative(self, medium: Media) -> str:
        """Return the path of a file from the folder of the table, if both are in one folder."""
        path, folder = os.path.abspath(medium.path or ""), self.path.parent.absolute()
        near = Path(path).is_relative_to(folder.parent)
        return Path(os.path.relpath(path, folder)).as_posix() if near else path

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
    the `question`, the annotator as `user_id`, and whether the question was a `repeat`. Half a row
    at the end, from a kill during a write, is no vote, because it was not confirmed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        content = path.read_bytes() if path.exists() else b""
        lines = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                self.rows[row["id"]] = row
            except (ValueError, TypeError, KeyError) as error:
                if number < len(lines) or not isinstance(error, ValueError):
                    raise ValueError(f"{path} line {number} is no vote: {line[:60]!r}") from error
        self._is_cut = bool(lines[-1])

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, and wait until it is on the disk."""
        if self._is_cut:  # reading leaves the file as it is; the server, which adds, has a lock
            self._replace(self.rows)
        new = not self.path.exists()
        end = 0 if new else self.path.stat().st_size
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self.path, end)  # or the next vote would follow half a row
            raise
        if new:
            sync_file(self.path.parent)
        self.rows[row["id"]] = dict(row)

    def remove(self, id: str) -> None:
        """Delete a row; the file is replaced at once."""
        self._replace({key: row for key, row in self.rows.items() if key != id})

    def _replace(self, rows: dict[str, dict[str, Any]]) -> None:
        with atomic_write(self.path) as partial:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()]
            partial.write_text("".join(lines), encoding="utf-8")
            sync_file(partial)
        sync_file(self.path.parent)
        self.rows, self._is_cut = rows, False

    def relative(self, medium: Media) -> str:
        """Return the path of a file from the folder of the table, if both are in one folder."""
        path, folder = os.path.abspath(medium.path or ""), self.path.parent.absolute()
        near = Path(path).is_relative_to(folder.parent)
        return Path(os.path.relpath(path, folder)).as_posix() if near else path

"""Answers that were already given, by the hash of what was asked."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

_MOST_IN_MEMORY = 20_000


class AnswerCache:
    """JSON answers in main memory, or in a folder that outlives the process.

    A file appears whole or not at all, so several processes may share a folder. One that cannot be
    read is asked for again.
    """

    def __init__(self, folder: str | None = None):
        self.folder = None if folder is None else Path(folder)
        self._memory: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        """The answer with this key, or None."""
        if self.folder is None:
            return self._memory.get(key)
        try:
            return json.loads(self._path(key).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def put(self, key: str, answer: Any) -> None:
        """Keep an answer; in memory the oldest one goes where there are too many."""
        if self.folder is None:
            self._memory[key] = answer
            if len(self._memory) > _MOST_IN_MEMORY:
                del self._memory[next(iter(self._memory))]
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        with os.fdopen(handle, "w") as file:
            json.dump(answer, file)
        os.replace(partial, path)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"

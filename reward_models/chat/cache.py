"""Caches the answers of chat models by the hash of the request."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

_MOST_IN_MEMORY = 20_000


class AnswerCache:
    """Stores JSON answers in main memory, or in a folder that persists after the process.

    A file is written atomically, so several processes may share a folder. A file that cannot be
    read counts as missing.
    """

    def __init__(self, folder: str | None = None):
        self.folder = None if folder is None else Path(folder)
        self._memory: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        """Return the answer with this key, or None."""
        if self.folder is None:
            return self._memory.get(key)
        try:
            return json.loads(self._path(key).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def put(self, key: str, answer: Any) -> None:
        """Store an answer; a full memory cache drops its oldest one."""
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

    def drop(self, key: str) -> None:
        """Remove the answer with this key, if there is one."""
        self._memory.pop(key, None)
        if self.folder is not None:
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"

"""Spares chat servers requests: known answers are cached, and a server that is down gets a rest."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from flowalign.utils.files import parse_json

_MOST_IN_MEMORY = 20_000


class AnswerCache:
    """Stores JSON answers in main memory, in a folder that persists after the process, or nowhere.

    A file is written atomically, so several processes may share a folder. A file that cannot be
    read counts as missing.
    """

    def __init__(self, place: str | None):
        """`place` is `memory`, a folder, or None to store nothing."""
        self.folder = None if place in (None, "memory") else Path(place)
        self._memory: dict[str, Any] = {}
        self._most = _MOST_IN_MEMORY if place else 0

    def get(self, key: str) -> Any | None:
        """Return the answer with this key, or None."""
        if self.folder is None:
            return self._memory.get(key)
        try:
            return parse_json(self._path(key).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def put(self, key: str, answer: Any) -> None:
        """Store an answer; a full memory cache drops its oldest one."""
        if self.folder is None:
            self._memory[key] = answer
            if len(self._memory) > self._most:
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


T = TypeVar("T")


class ChatError(Exception):
    """Raised if a request has no answer; the text gives the reason."""


class ServerDown(ChatError):
    """Raised if the server and not the request is at fault: no attempt gave a usable answer.

    `retry_after` is the number of seconds that the server asks to wait.
    """

    def __init__(self, reason: str, retry_after: float = 0.0):
        super().__init__(reason)
        self.retry_after = retry_after


class CircuitBreaker:
    """Stops requests to a server that is down, and tries again after a rest.

    The breaker is closed until `max_failures` requests in a row find the server down, then open.
    While open, it rejects requests immediately. After `rest` seconds it is half open: one request
    tries the server while the others wait, and its outcome closes or opens the breaker for all of
    them. Use it from one event loop only.
    """

    def __init__(self, max_failures: int, rest: float):
        self.max_failures, self.rest = max_failures, rest
        self._failures = 0
        self._until: float | None = None
        self._probe = asyncio.Lock()

    async def call(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask`; raise ChatError immediately while the breaker is open."""
        if self._until is not None:
            async with self._probe:
                if self._until is not None and time.monotonic() < self._until:
                    raise ServerDown(
                        f"not sent: the server failed {self._failures} times in a row, so requests "
                        f"pause for {self.rest:g} s"
                    )
                if self._until is not None:
                    return await self._counted(ask)
        return await self._counted(ask)

    async def _counted(self, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await ask()
        except ServerDown:
            self._failures += 1
            if self._failures >= self.max_failures:
                self._until = time.monotonic() + self.rest
            raise
        except ChatError:  # the server answered, so it is up
            self._failures, self._until = 0, None
            raise
        self._failures, self._until = 0, None
        return answer

"""Limit the time in which the head of a request arrives; uvicorn limits idle connections only."""

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection whose next request has not begun to be answered in time."""

    def __init__(self, *given: Any, seconds: float, **named: Any):
        super().__init__(*given, **named)
        self._seconds = seconds
        self._late: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, seconds: float) -> Any:
        """Return what makes such a protocol for each connection."""
        return partial(cls, seconds=seconds)

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        """Read some bytes, and stop the clock when they complete a head."""
        super().data_received(data)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop()

    def _limit_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._late is None:
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(self._seconds, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

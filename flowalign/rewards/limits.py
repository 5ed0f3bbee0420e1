"""Limit what the requests of a reward server may ask for and hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, require_ranges

MIB = 2**20
BYTES_PER_PIXEL = 3 * 4
"""Size of a decoded pixel: three channels in float32."""
RETRY_AFTER_S = 1
"""Seconds after which a client that was refused for lack of room should ask again."""


class Refused(Exception):
    """Refuses a request with an HTTP error status."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits the load that a server accepts."""

    max_batch: PositiveInt = 64
    """Largest number of samples per call of the model."""
    max_wait_ms: NonNegativeFloat = 3.0
    """Milliseconds that a request waits for others to share its batch."""
    deadline: PositiveFloat = 60.0
    """Seconds until a request fails, unless it asks for less."""
    max_request_mb: PositiveFloat = 256.0
    """Largest size of a request, in MiB; larger ones are refused with 413."""
    max_picture_mp: PositiveFloat = 16.0
    """Largest picture or frame, in millions of pixels, by its declared size; 413 beyond it."""
    max_request_mp: PositiveFloat = 100.0
    """Largest number of pixels of all pictures and frames of a request, in millions; 413 beyond
    it."""
    max_held_mb: PositiveFloat = 4096.0
    """Memory of all requests that are read or wait, in MiB; 503 beyond it."""
    max_requests: PositiveInt = 1024
    """Largest number of requests that are read or wait; 503 beyond it."""
    read_timeout: PositiveFloat = 30.0
    """Seconds in which a request must have arrived; 408 beyond it."""

    def __post_init__(self) -> None:
        """Refuse limits that let no request through."""
        require_ranges(self, "limits")
        needed = self.max_request_mb + self.max_request_mp * 1e6 * BYTES_PER_PIXEL / MIB
        if self.max_held_mb < needed:
            raise ValueError(
                f"max_held_mb is {self.max_held_mb:g}; the largest request needs {needed:.0f}: "
                "raise it, or lower max_request_mb or max_request_mp"
            )


class Held:
    """Counts the memory that one request holds."""

    def __init__(self, room: "Room"):
        self._room, self.size = room, 0

    def add(self, size: int) -> None:
        """Hold some bytes more; raises Refused if there is no room for them."""
        if self._room.size + size > self._room.limits.max_held_mb * MIB:
            raise Refused(503, f"waiting requests fill {self._room.limits.max_held_mb:g} MB")
        self._room.size += size
        self.size += size


class Room:
    """Counts the requests that a server holds, and their memory. One thread uses it."""

    def __init__(self, limits: Limits):
        self.limits, self.requests, self.size = limits, 0, 0

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """Hold a request while the context lasts; raises Refused if there are too many."""
        if self.requests >= self.limits.max_requests:
            raise Refused(503, f"{self.limits.max_requests} requests are waiting already")
        self.requests += 1
        held = Held(self)
        try:
            yield held
        finally:
            self.requests -= 1
            self.size -= held.size

"""End this process with a message if another process of the run hangs silently.

A process that ends closes its connections, which the other processes notice immediately. A machine
that loses power or its network closes no connections. Therefore every process increments a counter
in the store of the run, and checks that the counters of the other processes advance.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from flowalign.distributed.failures import leave_failure

BEAT_S = 5.0
"""Seconds between two beats."""
MISSED = 60
"""Number of own beats without a beat of another process after which it is lost (five minutes). A
suspended machine makes no beats, so it does not declare others lost."""
_STORE = timedelta(seconds=60)
_LEFT = b"left"
_WIDTH = 16
"""Bytes of a beat in a file."""


class Silence:
    """Number of beats since the counter of each other process advanced."""

    def __init__(self, missed: int):
        self.missed = missed
        self.last: dict[int, bytes] = {}
        self.silent: dict[int, int] = {}

    def find_lost(self, found: Mapping[int, bytes]) -> list[int]:
        """Process the counters of one beat, and return the ranks of lost processes."""
        for rank, number in found.items():
            goes_on = number == _LEFT or number != self.last.get(rank)
            self.silent[rank] = 0 if goes_on else self.silent[rank] + 1
        self.last = dict(found)
        return [rank for rank, beats in self.silent.items() if beats >= self.missed]


class BeatFile:
    """File of fixed size with the last beat of each process of one machine.

    Torch's `FileStore` appends every beat to its file, and reads forever once the disk was full.
    """

    def __init__(self, path: str):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def set(self, key: str, beat: str) -> None:
        """Store the beat of a process."""
        os.pwrite(self.file, beat.ljust(_WIDTH).encode(), _WIDTH * int(key.rpartition("/")[2]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the beats of some processes; they are blank before the first one."""
        places = [_WIDTH * int(key.rpartition("/")[2]) for key in keys]
        return [os.pread(self.file, _WIDTH, place).strip() for place in places]


class Heartbeat:
    """Thread that beats from `start` to the end of the process, and watches other processes."""

    def __init__(self, store: dist.Store | BeatFile, rank: int, world: int):
        if isinstance(store, dist.Store):
            store = store.clone()  # a separate connection for the thread
            store.set_timeout(_STORE)
        self.store, self.rank = store, rank
        self.others = [other for other in range(world) if other != rank]
        self.silence, self.stopped = Silence(MISSED), threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; at a normal exit the process marks itself as left."""
        self.store.set(_store_key(self.rank), "0")
        self.thread.start()
        atexit.register(self._leave)

    def _beat(self) -> None:
        beats = 0
        while not self.stopped.wait(BEAT_S):
            beats, began = beats + 1, time.monotonic()
            try:
                lost = self._look(str(beats))
            except RuntimeError as error:
                if time.monotonic() - began < _STORE.total_seconds():
                    return  # the store was closed because a process ended; others notice that
                _end_process(
                    f"the store of the run cannot be reached: {str(error).splitlines()[0]}"
                )
            else:
                if lost:
                    _end_process(
                        f"process {lost[0]} has not answered for {BEAT_S * MISSED:g} seconds"
                    )

    def _look(self, number: str) -> list[int]:
        self.store.set(_store_key(self.rank), number)
        found = self.store.multi_get([_store_key(other) for other in self.others])
        return self.silence.find_lost(dict(zip(self.others, found, strict=True)))

    def _leave(self) -> None:
        self.stopped.set()
        self.thread.join(BEAT_S)
        with suppress(RuntimeError):
            self.store.set(_store_key(self.rank), _LEFT.decode())


def _store_key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _end_process(why: str, end: Callable[[int], None] = os._exit) -> None:
    """End immediately, because the training thread waits in a call that nothing else ends."""
    text = f"flowalign: {why}, so this process ends as well; continue with --resume\n"
    if not leave_failure(1, text):
        sys.stderr.write(text)
        sys.stderr.flush()
    end(1)

"""Choose the examples of every step, and build batches in a thread before their step."""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

from flowalign.utils.seeds import shuffle


class EpochSampler:
    """Sampler of all available examples, in a new random order each epoch.

    Example i is available from step `since[i]`. When further examples become available, a new epoch
    over all of them begins.
    """

    def __init__(self, seed: int, since: Sequence[int]):
        self.seed, self.since = seed, tuple(since)
        self.starts = sorted({0, *since})
        if min(since, default=1) > 0:
            raise ValueError("no pair is available at the first step; stages must begin with 0")

    def batch(self, step: int, size: int) -> list[int]:
        """Return the indices of the examples of a step."""
        start = self.starts[bisect_right(self.starts, step) - 1]
        available = self._available(start)
        first, found = (step - start) * size, []
        for n in range(first, first + size):
            epoch, offset = divmod(n, len(available))
            order = shuffle(f"{self.seed}:{start}:{epoch}", len(available))
            found.append(available[order[offset]])
        return found

    @lru_cache(maxsize=2)  # noqa: B019 (one order per run)
    def _available(self, start: int) -> list[int]:
        return [i for i, since in enumerate(self.since) if since <= start]


T = TypeVar("T")


def prefetch(
    make: Callable[[int], T], steps: Iterable[int], ahead: int
) -> Iterator[tuple[T, float]]:
    """Yield `make(step)` for every step in order, with the seconds that the caller waited for it.

    One thread builds up to `ahead` further results while the caller works. An exception of `make`
    is raised at its step. Closing the iterator ends the thread.
    """
    pool, building = ThreadPoolExecutor(1), deque[Future[T]]()
    try:
        for step in steps:
            building.append(pool.submit(make, step))
            if len(building) > ahead:
                yield _wait_for(building.popleft())
        while building:
            yield _wait_for(building.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _wait_for(future: Future[T]) -> tuple[T, float]:
    start = time.perf_counter()
    return future.result(), time.perf_counter() - start

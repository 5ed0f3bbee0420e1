"""Build batches in a thread before the step that needs them."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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

"""Stop a run between two steps when somebody presses Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C asks to stop after the current step; the second stops at once."""
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread: whoever runs us there handles Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, previous)

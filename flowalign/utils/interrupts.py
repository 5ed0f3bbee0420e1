"""Stop on Ctrl-C or on a scheduler's SIGTERM, immediately or between two steps of a run."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

SIGNALS = signal.SIGINT, signal.SIGTERM
"""Signals that request a stop."""
Handler = Callable[[int, object], None]
_SOURCES: list[Callable[[], int]] = []


class Terminated(KeyboardInterrupt):
    """Request to stop by SIGTERM; handlers of KeyboardInterrupt handle it as well."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a stopped process: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def handle_signals(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install signal handlers inside the context; outside the main thread, do nothing."""
    previous = {}
    try:
        for number, handler in handlers.items():
            previous[number] = signal.signal(number, handler)
    except ValueError:  # Python only allows signal handlers in the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """Raise Terminated at the first SIGTERM inside the context; ignore further ones."""
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise Terminated

    with handle_signals({signal.SIGTERM: handler}):
        yield


def listen_to(source: Callable[[], int]) -> None:
    """Let `stop_between_steps` also ask a function, which returns a signal or 0.

    Signals reach only the main thread, and no thread of a worker on another machine.
    """
    _SOURCES.append(source)


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], int]]:
    """Defer Ctrl-C and SIGTERM inside the context; yield a function that returns the signal, or 0.

    A second Ctrl-C stops immediately. A second SIGTERM does not, because a launcher and a scheduler
    may both send one; use SIGKILL to stop immediately.
    """
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)

    with handle_signals(dict.fromkeys(SIGNALS, handler)):
        yield lambda: max([*asked, *(source() for source in _SOURCES)], default=0)

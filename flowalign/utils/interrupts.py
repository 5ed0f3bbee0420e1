"""Stop at Ctrl-C, or at the SIGTERM of a scheduler: at once, or between two steps of a run."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = signal.SIGINT, signal.SIGTERM
"""Signals that ask to stop."""
Handler = Callable[[int, object], None]


class Terminated(KeyboardInterrupt):
    """Signals that SIGTERM asks to stop; whoever handles Ctrl-C handles it too."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return what a shell reports of a stopped process: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """Within, the first SIGTERM raises Terminated; further ones find it obeyed and do nothing."""
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise Terminated

    with _handled({signal.SIGTERM: handler}):
        yield


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], int]]:
    """Within, Ctrl-C and SIGTERM only ask to stop: the yielded function returns which did, or 0.

    A second Ctrl-C stops at once. A second SIGTERM does not: a launcher and a scheduler may both
    send one, and whoever cannot wait has SIGKILL.
    """
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)

    with _handled(dict.fromkeys(SIGNALS, handler)):
        yield lambda: max(asked, default=0)


@contextmanager
def _handled(handlers: dict[signal.Signals, Handler]) -> Iterator[None]:
    """Handle signals so within; outside the main thread, whoever runs us there handles them."""
    previous = {}
    try:
        for number, handler in handlers.items():
            previous[number] = signal.signal(number, handler)
    except ValueError:  # not the main thread, of which Python asks that it handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

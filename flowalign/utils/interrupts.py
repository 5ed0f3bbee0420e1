"""Stop on Ctrl-C or a scheduler's signal, immediately or between two steps, or with the parent.

For a child that ends with its parent, even by SIGKILL, the parent keeps one end of a pipe open and
never writes to it. A thread of the child waits at the other end. The system closes the pipe when
the parent ends, and the waiting thread then ends the child. A child that a library starts does not
inherit the pipe; it opens a named one. (PR_SET_PDEATHSIG would end the child with the thread that
started it instead of the process, and exists only on Linux.)
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

STOPS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
"""Signals of schedulers that request a stop; a closed terminal sends SIGHUP."""
SIGNALS = signal.SIGINT, *STOPS
"""Signals that request a stop."""
Handler = Callable[[int, object], None]
_SOURCES: list[Callable[[], int]] = []
_END = "FLOWALIGN_PARENT_PIPE"
"""Environment variable with the file descriptor, or the path, of the pipe that a child waits on."""


class Terminated(KeyboardInterrupt):
    """Request to stop by a signal; handlers of KeyboardInterrupt handle it as well."""

    def __init__(self, number: int = signal.SIGTERM):
        super().__init__()
        self.number = number


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a stopped process: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (stop.number if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def handle_signals(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install signal handlers inside the context; outside the main thread, do nothing.

    A process that nohup started goes on ignoring SIGHUP.
    """
    previous = {}
    try:
        for number, handler in handlers.items():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
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
    """Raise Terminated at the first signal of a scheduler inside the context; ignore further ones.

    Code that this interrupts may fail in another way, which is a stop as well.
    """
    asked: list[int] = []

    def handler(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise Terminated(number)

    with handle_signals(dict.fromkeys(STOPS, handler)):
        try:
            yield
        except Exception as error:
            if asked:
                raise Terminated(asked[0]) from error
            raise


def listen_to(source: Callable[[], int]) -> None:
    """Let `stop_between_steps` also ask a function, which returns a signal or 0.

    Signals reach only the main thread, and no thread of a worker on another machine.
    """
    _SOURCES.append(source)


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], int]]:
    """Defer stop signals inside the context; yield a function that returns the signal, or 0.

    A second Ctrl-C stops immediately. A second SIGTERM does not, because a launcher and a scheduler
    may both send one; use SIGKILL to stop immediately.
    """
    asked: list[int] = []
    # A terminal sends Ctrl-C to a launcher as well, which forwards it.
    copies = 1 if "TORCHELASTIC_RUN_ID" in os.environ else 0

    def handler(number: int, _: object) -> None:
        if number == signal.SIGINT and asked.count(number) > copies:
            raise KeyboardInterrupt
        asked.append(number)

    with handle_signals(dict.fromkeys(SIGNALS, handler)):
        yield lambda: max([*asked, *(source() for source in _SOURCES)], default=0)


def tie_to_parent(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return `subprocess.Popen` arguments that make a flowalign command end with its parent."""
    waiting, _ = _open_pipe()
    inherited = os.environ if environment is None else environment
    return {"env": {**inherited, _END: str(waiting)}, "pass_fds": (waiting,)}


def tie_all_children(folder: Path) -> None:
    """Make all flowalign commands that this process starts end with it; keep the pipe in `folder`.

    For children that a library starts, so that `tie_to_parent` cannot be used.
    """
    pipe = folder / "parent"
    os.mkfifo(pipe)
    os.open(pipe, os.O_RDWR)  # stays open until this process ends
    os.environ[_END] = str(pipe)


def end_with_parent() -> None:
    """End this process when its parent ends, if the parent tied it to itself.

    A partially written file is lost, as with a kill; complete files stay.
    """
    # Remove the variable, so that a child of this process does not watch its grandparent.
    waiting = os.environ.pop(_END, None)
    if waiting is not None:
        threading.Thread(target=_end_at_close, args=(waiting,), daemon=True).start()


def _end_at_close(pipe: str) -> None:
    with suppress(FileNotFoundError):  # removed by a parent that has ended
        # A named pipe without a writer would block an open that may wait.
        waiting = int(pipe) if pipe.isdigit() else os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(waiting, True)
        os.read(waiting, 1)
    os._exit(1)  # sys.exit would only end this thread


@cache
def _open_pipe() -> tuple[int, int]:
    """Return the read and the write end, which stay open until this process ends.

    The write end is not inheritable, so no child can keep it open after the parent has ended.
    """
    return os.pipe()

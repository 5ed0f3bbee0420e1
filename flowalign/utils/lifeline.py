"""End processes with the one that started them, however that one ends.

The starter holds one end of a pipe for as long as it lives and never writes to it. A process that
it starts waits at the other end, in a thread. The system closes the pipe when the starter ends, by
SIGKILL too, and the waiting thread then ends its process.
"""

import os
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

_END = "FLOWALIGN_LIFELINE"
"""Environment variable with the file descriptor that a started process waits at."""


def tied(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` for a command of flowalign that ends with us."""
    waiting, _ = _pipe()
    inherited = os.environ if environment is None else environment
    return {"env": {**inherited, _END: str(waiting)}, "pass_fds": (waiting,)}


def end_with_starter() -> None:
    """End this process as soon as the one that started it `tied` is gone; otherwise do nothing.

    What is being written is lost, as by a kill; files that are complete stay.
    """
    waiting = os.environ.pop(_END, None)  # processes that we start are tied to us, not to it
    if waiting is not None:
        threading.Thread(target=_end_at_close, args=(int(waiting),), daemon=True).start()


def _end_at_close(waiting: int) -> None:
    os.read(waiting, 1)
    os._exit(1)


@cache
def _pipe() -> tuple[int, int]:
    """Return the reading and the writing end, which stay open until this process ends."""
    return os.pipe()

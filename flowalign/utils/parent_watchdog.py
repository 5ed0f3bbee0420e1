"""End child processes when their parent ends, even by SIGKILL.

The parent keeps one end of a pipe open and never writes to it. A thread of the child waits at the
other end. The system closes the pipe when the parent ends, and the waiting thread then ends the
child. (PR_SET_PDEATHSIG would end the child with the thread that started it instead of the process,
and exists only on Linux.)
"""

import os
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

_END = "FLOWALIGN_PARENT_PIPE"
"""Environment variable with the file descriptor that a child waits on."""


def tie_to_parent(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return `subprocess.Popen` arguments that make a flowalign command end with its parent."""
    waiting, _ = _open_pipe()
    inherited = os.environ if environment is None else environment
    return {"env": {**inherited, _END: str(waiting)}, "pass_fds": (waiting,)}


def end_with_parent() -> None:
    """End this process when its parent ends, if the parent started it with `tie_to_parent`.

    A partially written file is lost, as with a kill; complete files stay.
    """
    # Remove the variable, so that a child of this process does not watch its grandparent.
    waiting = os.environ.pop(_END, None)
    if waiting is not None:
        threading.Thread(target=_end_at_close, args=(int(waiting),), daemon=True).start()


def _end_at_close(waiting: int) -> None:
    os.read(waiting, 1)
    os._exit(1)  # sys.exit would only end this thread


@cache
def _open_pipe() -> tuple[int, int]:
    """Return the read and the write end, which stay open until this process ends.

    The write end is not inheritable, so no child can keep it open after the parent has ended.
    """
    return os.pipe()

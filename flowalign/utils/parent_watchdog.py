"""End child processes when their parent ends, even by SIGKILL.

The parent holds one end of a pipe for as long as it lives and never writes to it. A child waits at
the other end, in a thread. The system closes the pipe when the parent ends, and the waiting thread
then ends the child. (PR_SET_PDEATHSIG would end it with the thread that started it, not with the
process, and exists on Linux only.)
"""

import os
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

_END = "FLOWALIGN_PARENT_PIPE"
"""Environment variable with the file descriptor that a child waits at."""


def tie_to_parent(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` that make a flowalign command end with its parent."""
    waiting, _ = _open_pipe()
    inherited = os.environ if environment is None else environment
    return {"env": {**inherited, _END: str(waiting)}, "pass_fds": (waiting,)}


def end_with_parent() -> None:
    """Watch the parent, if it started this process with `tie_to_parent`, and end when it ends.

    A file that is being written is lost, as by a kill; complete files stay.
    """
    # Removed, so that a child of this process watches this one and not its grandparent.
    waiting = os.environ.pop(_END, None)
    if waiting is not None:
        threading.Thread(target=_end_at_close, args=(int(waiting),), daemon=True).start()


def _end_at_close(waiting: int) -> None:
    os.read(waiting, 1)
    os._exit(1)  # sys.exit would end this thread only


@cache
def _open_pipe() -> tuple[int, int]:
    """Return the reading and the writing end, which stay open until this process ends.

    The writing end is not inheritable, so no child can keep it open after the parent has ended.
    """
    return os.pipe()

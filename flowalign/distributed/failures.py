"""Report only the first process that fails, because the other failures follow from it.

A process leaves its exit code and message in the error file that torch's elastic agent gives it.
The agent reads only whole seconds of such files, so the launcher orders them itself.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from flowalign.utils.files import write_text

RUN_ID = "flowalign"
"""Value of `TORCHELASTIC_RUN_ID` in processes of our launcher, which reports their failures. Other
launchers, such as torchrun, print only their exit codes."""
USER_ERROR = 2
"""Exit code of an error that the user must correct, which a restart would repeat."""
STOPPED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes of a process that was stopped by Ctrl-C or SIGTERM, which is no failure."""


def leave_failure(code: int, text: str) -> bool:
    """Store an exit code and its message; return whether a launcher will report them."""
    file = _error_file()
    if file is None:
        return False
    write_text(file, json.dumps({"message": text, "code": code, "timestamp": int(time.time())}))
    return True


def leave_stop(code: int) -> int:
    """Return the exit code of this process; for a stop, store it for the launcher and return 0.

    The elastic agent takes any other code for a failure, and would end processes that still save.
    """
    file = _error_file()
    if file is None or code not in STOPPED:
        return code
    if not file.exists():
        leave_failure(code, "")
    return 0


def leave_crashes() -> None:
    """Store the traceback of an uncaught error for the launcher, if there is one."""
    if _error_file():
        sys.excepthook = leave_crash


def leave_crash(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Store the traceback of an error for the launcher; ignore None and Ctrl-C."""
    if error is not None and not isinstance(error, KeyboardInterrupt):
        leave_failure(1, "".join(traceback.format_exception(kind, error, trace)))


def read_first_failure(folder: Path) -> tuple[float, int, str] | None:
    """Return the time, exit code and message of the process of a folder that failed first."""
    found = [(path.stat().st_mtime, path) for path in folder.rglob("error.json")]
    if not found:
        return None
    seconds, path = min(found)
    first = json.loads(path.read_text(encoding="utf-8"))
    return seconds, first["code"], first["message"]


def _error_file() -> Path | None:
    if os.environ.get("TORCHELASTIC_RUN_ID") != RUN_ID:
        return None
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"])

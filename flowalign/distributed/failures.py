"""Report only the first process that fails, because the other failures follow from it."""

import json
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from flowalign.utils.files import write_text

FOLDER = "FLOWALIGN_LAUNCH"
"""Environment variable with the folder that the processes of one launch share."""
_PATTERN = "failure-*.json"


def leave_failure(code: int, text: str) -> bool:
    """Store an exit code and its message; return whether a launcher will report them."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return False
    path = Path(folder) / _PATTERN.replace("*", os.environ["RANK"])
    write_text(path, json.dumps({"code": code, "text": text}))
    return True


def leave_crashes() -> None:
    """Store the traceback of an uncaught error for the launcher, if there is one."""
    if FOLDER in os.environ:
        sys.excepthook = _leave_crash


def read_first_failure(folder: Path) -> tuple[int, str] | None:
    """Return the exit code and the message of the process that failed first."""
    found = sorted(folder.glob(_PATTERN), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        return None
    first = json.loads(found[0].read_text(encoding="utf-8"))
    return first["code"], first["text"]


def _leave_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, KeyboardInterrupt):
        leave_failure(1, "".join(traceback.format_exception(kind, error, trace)))

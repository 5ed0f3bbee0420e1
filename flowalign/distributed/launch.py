"""Replace a command that several processes share by their launcher, and report the first failure.

A process leaves the message of its failure in the error file that torch's elastic launcher gives
it. The launcher reports only the first failure, because the others follow from it.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from flowalign.utils.errors import ConfigError
from flowalign.utils.files import write_text
from flowalign.utils.interrupts import SIGNALS

STARTS = "FLOWALIGN_STARTS"
"""Environment variable with the number of earlier starts of the processes of this command."""
STORE = "FLOWALIGN_STORE"
"""Environment variable with the private file through which processes of one machine meet."""
RUN_ID = "flowalign"
"""Value of `TORCHELASTIC_RUN_ID` in processes of our launcher, which reports their failures. Other
launchers, such as torchrun, print only their exit codes."""
USER_ERROR = 2
"""Exit code of an error that the user must correct, which a restart would repeat."""
STOPPED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a process that was stopped by Ctrl-C or a scheduler, which is no failure."""


@dataclass(frozen=True)
class Launch:
    """Number of processes and machines, and restarts after a failure."""

    processes: int
    """Processes on each machine."""
    restarts: int = 0
    """Restarts of all processes after the failure of one."""
    nodes: int = 1
    """Machines."""
    rendezvous: str | None = None
    """Address where the launchers of several machines meet, `host:port` of one of them."""


def starts_others(processes: int, launched: bool = False) -> bool:
    """Return whether this process must start others; False if it is alone or was started itself.

    `launched`: a single process needs a launcher as well.
    """
    if "RANK" not in os.environ:
        return launched or processes > 1
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if str(processes) not in ("1", started):
        raise ConfigError(
            f"--processes is {processes}, but RANK is set, so a launcher has started {started}: "
            "leave out --processes, or unset RANK"
        )
    return False


def relaunch(launch: Launch, argv: Sequence[str]) -> NoReturn:
    """Replace this process by a launcher that starts the command once per process.

    The launcher lives as long as the processes, so it must not keep the memory and the GPU context
    of a process that has checked the command.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Only a command that was started with -m may import modules of the current folder.
    safe = ["-P"] if sys.path[0] not in ("", os.getcwd()) else []
    words = [*safe, "-m", "flowalign.distributed.elastic", json.dumps(asdict(launch)), *argv]
    os.execv(sys.executable, [sys.executable, *words])


def is_restarted() -> bool:
    """Return whether this process continues the work of an earlier one of the same launcher."""
    return any(os.environ.get(name, "0") != "0" for name in (STARTS, "TORCHELASTIC_RESTART_COUNT"))


def report_restart() -> None:
    """Print why the processes of our launcher were restarted; end them if the user is the cause."""
    number, file = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), _error_file()
    if not number or file is None:
        return
    failure = read_first_failure(file.parents[1].with_name(f"attempt_{number - 1}"))
    if failure and failure[1] == USER_ERROR:
        leave_failure(*failure[1:])
        sys.exit(USER_ERROR)
    if os.environ["LOCAL_RANK"] == "0":
        most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        text = failure[2] if failure else ""
        sys.stderr.write(f"{text}flowalign: restart {number} of {most}\n")


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
    # Torch compares only whole seconds.
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

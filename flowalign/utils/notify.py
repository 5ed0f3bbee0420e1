"""Start a command of the user on an event of a run; its failure never ends the run."""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from flowalign.utils.files import to_json

LONGEST_S = 60.0
"""Seconds after which the command is stopped."""
Event = Literal["finished", "interrupted", "failed", "hacking"]


def notify(
    command: Sequence[str],
    event: Event,
    folder: Path,
    about: Mapping[str, Any],
    log: Callable[[str], None],
) -> None:
    """Run a command without a shell, with one line of JSON on its standard input.

    The JSON has the `event`, the run directory as `run`, and the entries of `about`. A command that
    is missing, fails, or takes more than `LONGEST_S` seconds is logged.
    """
    if not command:
        return
    try:
        done = subprocess.run(
            list(command),
            input=to_json({"event": event, "run": str(folder.absolute()), **about}) + "\n",
            text=True,
            capture_output=True,
            timeout=LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        log(f"warning: notify {command[0]} failed: {str(error)[:200]}")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        log(f"warning: notify {command[0]} failed with exit code {done.returncode}: {last}")


@contextmanager
def notify_failure(
    command: Sequence[str], folder: Path, log: Callable[[str], None]
) -> Iterator[None]:
    """Notify of an error inside this context, and let it pass."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        reason = str(error).strip()[:1000] or type(error).__name__
        event: Event = "interrupted" if stopped else "failed"
        notify(command, event, folder, {"reason": reason}, log)
        raise

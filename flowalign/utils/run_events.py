"""Tell others about the events of a run: in its folder, and by a command of the user.

commands.txt   one line per start: the shell command, without secrets
failure.txt    the reason of a failure, until the run is started again

Secrets are the command `notify`, and credentials in URLs.
"""

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from flowalign.utils.files import to_json, write_text

COMMANDS, FAILURE = "commands.txt", "failure.txt"
LONGEST_S = 60.0
"""Seconds after which the command is stopped."""
Event = Literal["finished", "interrupted", "failed", "hacking"]
_SETTING = re.compile(r"(?m)^notify:.*\n(?:[ #-].*\n|\n)*")
_OPTION = re.compile(r"(?s)^((?:--)?notify=).*")
_FOLDERS = re.compile(r"((?:: |- |# )['\"]?)[/~][^\n#]*/")
_CREDENTIALS = re.compile(r"(://)[^\s/?#]*@")


@contextmanager
def record_command(folder: Path, command: str) -> Iterator[None]:
    """Record a command that works on a folder, and the reason if it fails inside this context."""
    (folder / FAILURE).unlink(missing_ok=True)
    write_text(folder / COMMANDS, "\n".join([*commands(folder), command, ""]))
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # on a full disk, the original error must reach the user
            write_text(folder / FAILURE, f"{_describe(error)}\n")
        raise


def commands(folder: Path) -> list[str]:
    """Return the commands that worked on a folder, oldest first."""
    file = folder / COMMANDS
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


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
    """Notify of an error inside this context, and let it pass.

    Ctrl-C and SystemExit, which are no Exception, also end a run that somebody waits for.
    """
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        event: Event = "interrupted" if stopped else "failed"
        notify(command, event, folder, {"reason": _describe(error)[:1000]}, log)
        raise


def _describe(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def hide_in_settings(text: str) -> str:
    """Return the YAML of a run without `notify`, and with *** instead of credentials in URLs."""
    return _CREDENTIALS.sub(r"\1***@", _SETTING.sub("", text))


def hide_folders(text: str) -> str:
    """Return the YAML of a run with the names instead of the absolute paths of files and folders.

    For publication: paths contain names of users and machines.
    """
    return _FOLDERS.sub(r"\1", text)


def hide_in_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command with *** instead of `notify` and of credentials in URLs."""
    hidden = ["***" if word == "--notify" else "" for word in ("", *words)]
    shown = [_OPTION.sub(r"\1***", word) for word in words]
    return [a or _CREDENTIALS.sub(r"\1***@", b) for a, b in zip(hidden, shown, strict=False)]

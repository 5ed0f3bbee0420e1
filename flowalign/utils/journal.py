"""Record the commands that worked on a run directory, and the failure of the last one.

commands.txt   one line per start: the shell command
failure.txt    the reason of a failure, until the run is started again
"""

from contextlib import suppress
from pathlib import Path
from types import TracebackType

from flowalign.utils.files import write_text

COMMANDS, FAILURE = "commands.txt", "failure.txt"


class Journal:
    """Record of a command that works on a folder; a context manager that also records failures."""

    def __init__(self, folder: Path, command: str):
        self.folder, self.command = folder, command

    def __enter__(self) -> "Journal":
        (self.folder / FAILURE).unlink(missing_ok=True)
        write_text(self.folder / COMMANDS, "\n".join([*commands(self.folder), self.command, ""]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        reason = str(error).strip() or type(error).__name__
        with suppress(OSError):  # on a full disk, the original error must reach the user
            write_text(self.folder / FAILURE, reason + "\n")


def commands(folder: Path) -> list[str]:
    """Return the commands that worked on a folder, oldest first."""
    file = folder / COMMANDS
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []

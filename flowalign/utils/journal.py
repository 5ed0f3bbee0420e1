"""Note in a run directory which commands worked on it, and why the last one failed.

commands.txt   one line a start: the command, as a shell takes it
failure.txt    the reason of a failure, until the run is started again
"""

from contextlib import suppress
from pathlib import Path
from types import TracebackType

from flowalign.utils.files import write_text

COMMANDS, FAILURE = "commands.txt", "failure.txt"


class Journal:
    """Notes a command that works on a folder; as a context manager, also why it failed."""

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
        with suppress(OSError):  # a full disk, whose own message must reach the user
            write_text(self.folder / FAILURE, reason + "\n")


def commands(folder: Path) -> list[str]:
    """Return the commands that worked on a folder, the first one first."""
    return _lines(folder / COMMANDS)


def failure(folder: Path) -> str:
    """Return why the last command failed; empty if it did not, or could not say."""
    return "\n".join(_lines(folder / FAILURE))


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []

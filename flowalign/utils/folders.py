"""Make folders, lock a folder for one process at a time, and keep one command's settings in it."""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from flowalign.utils.files import read_object, write_text

LOCK = "run.lock"
"""Lock file of the process that works in a folder. A killed process may leave the file, but the
lock ends with the process."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; return the new folders, innermost first.

    Raises:
        ValueError: The folder cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir {folder} cannot be made: {error.strerror}: {error.filename}"
        ) from error
    return missing


def check_folder_path(folder: Path, option: str = "--out") -> None:
    """Raise ValueError unless a folder exists that can be written to, or could be made.

    Nothing is written, so verbs call this before they load a model.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} {folder} is a file; it must be a folder")
    nearest = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    if not nearest.is_dir():
        raise ValueError(f"{option} {folder} cannot be made: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder} cannot be written: no permission in {nearest}")


def check_file_path(file: Path, overwrite: bool, option: str = "--out") -> None:
    """Raise ValueError unless a file can be written, which replaces one only with `overwrite`."""
    if file.is_dir():
        raise ValueError(f"{option} {file} is a folder; it must be a file")
    if file.exists() and not overwrite:
        raise ValueError(
            f"{option} {file} exists and is not overwritten: name another file, or add --overwrite"
        )
    check_folder_path(file.parent, f"folder of {option}")


def is_unused(folder: Path) -> bool:
    """Return whether a folder does not exist or is empty except for a lock file."""
    return not folder.exists() or all(path.name == LOCK for path in folder.iterdir())


def require_unused(folder: Path) -> None:
    """Raise ValueError if a folder has contents, which a new run would overwrite."""
    if not is_unused(folder):
        remedy = (
            "Add --resume to continue it, --overwrite to replace it, or choose another output_dir."
        )
        raise ValueError(f"{folder} already holds a run and is not overwritten.\n{remedy}")


def require_removable(folder: Path) -> None:
    """Raise ValueError unless a folder is unused, or holds the settings of a run."""
    if not is_unused(folder) and not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} holds no config.yaml, so it is no run and is not deleted")


def clear(folder: Path, last: str = "") -> None:
    """Delete the contents of a folder except its lock file; the file `last` is deleted last."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


class Claim:
    """Lock on a folder, made if necessary, until `release` or the end of the process.

    Raises:
        ValueError: Another process has locked the folder, or it cannot be made.
    """

    def __init__(self, folder: Path, log: Callable[[str], None]):
        self.folder, self._made = folder, make_folder(folder)
        try:
            self._file = _locked(folder / LOCK, log)
        except BlockingIOError as error:
            raise ValueError(_refusal(folder)) from error
        except OSError as error:
            raise ValueError(f"output_dir {folder} cannot be used: {error.strerror}") from error

    def release(self) -> None:
        """Release the lock; new folders are removed if they are empty."""
        if self._file.closed:
            return
        (self.folder / LOCK).unlink(missing_ok=True)
        self._file.close()
        for folder in self._made:
            if not folder.is_dir() or any(folder.iterdir()):
                return
            folder.rmdir()


def _locked(path: Path, log: Callable[[str], None]) -> IO[str]:
    """Open and lock a file, and write the id of this process into it.

    Raises:
        BlockingIOError: Another process has locked the file.
    """
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            log(f"{path.parent}: this file system has no locks; let no other process work there")
        if _is_at(path, file):
            break
        file.close()  # its owner removed the file between open and flock: try again
    file.truncate(0)
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
    file.flush()
    return file


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _refusal(folder: Path) -> str:
    try:
        holder = (folder / LOCK).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        holder = ""
    return (
        f"{folder} is in use by {holder or 'another process'}.\n"
        "Wait until it has ended or stop it, or choose another output_dir."
    )


@contextmanager
def hold_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file, which is released whenever the process ends, even by a kill.

    Raises:
        ValueError: Another process holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w", encoding="utf-8") as file:
        # flock is released with the process; a file that marks a lock would outlive a kill.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is scoring into {lock.parent}") from error
        yield


def record_settings(manifest: Path, settings: Mapping[str, Any], maker: str) -> None:
    """Write the settings of a folder, after comparing them with the settings of an earlier run.

    Raises:
        ValueError: A setting differs, or the folder has other files; `maker` is the command's name.
    """
    compare_settings(manifest, settings, maker)
    write_text(manifest, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def compare_settings(manifest: Path, settings: Mapping[str, Any], maker: str) -> None:
    """Raise ValueError for a folder that was made with other settings or has other files."""
    folder = manifest.parent
    # Read once: another shard of the same job may write the manifest at any time.
    found = {path.name for path in folder.glob("*") if path.is_file()}
    if manifest.name not in found:
        if any(not name.startswith(".") for name in found):
            raise ValueError(f"{folder} holds files that {maker} did not write")
        return
    earlier = read_object(manifest)
    differs = [name for name in settings if settings[name] != earlier.get(name)]
    if differs:
        was, now = (str(side.get(differs[0])) for side in (earlier, settings))
        raise ValueError(
            f"{folder} was made with other settings: {', '.join(differs)} differ;\n"
            f"{differs[0]} was {was[:200]!r}, now {now[:200]!r}\n"
            "choose another --out, or the earlier settings"
        )

"""Begin, claim and clear run directories, and check that a run may resume."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flowalign.distributed.processes import Processes
from flowalign.runs.config import Run
from flowalign.runs.config.changes import check_resumable, shorten_list
from flowalign.training import checkpoint
from flowalign.training.recipe import Recipe
from flowalign.utils import folders
from flowalign.utils.files import write_text
from flowalign.utils.folders import Claim, is_unused
from flowalign.utils.strict_yaml import parse_yaml, read_yaml
from flowalign.utils.tracking import FILE

CONFIG = "config.yaml"
"""File of the complete settings, in run directories and in checkpoints."""
_MOST_CHANGES = 12


def is_opening(folder: Path, recipe: Recipe) -> bool:
    """Return whether a run was killed while its recipe opened; then it needs no --resume."""
    begun = any((folder / name).exists() for name in recipe.open_files)
    trained = (folder / FILE).exists() or any((folder / "checkpoints").glob("*"))
    return begun and not trained


def check_start(run: Run, config: str, overwrite: bool) -> None:
    """Check that a run may begin in its directory.

    Raises:
        ValueError: The directory holds another run or other files.
    """
    folder = Path(run.output_dir)
    if overwrite:
        _check_removable(folder)
    elif is_opening(folder, run.recipe) and (folder / CONFIG).is_file():
        check_resume(run, config, folder)
    elif not is_unused(folder):
        raise ValueError(
            f"{folder} already holds a run and is not overwritten.\n"
            "Add --resume to continue it, --overwrite to replace it, "
            "or choose another output_dir."
        )


def check_resume(run: Run, config: str, resume: Path) -> list[str]:
    """Check that a run may resume from a checkpoint or a run directory; return the changes.

    Raises:
        ValueError: A file of the checkpoint is damaged, a setting differs that cannot change, or
            the checkpoint has more than `num_steps` steps.
    """
    if resume != Path(run.output_dir):
        checkpoint.check_complete(resume)
    return compare_settings(run, config, resume)


def compare_settings(run: Run, config: str, resume: Path) -> list[str]:
    """Return the settings of a checkpoint, or of a run directory, that a run changes.

    Raises:
        ValueError: A setting differs that cannot change, or the checkpoint has more than
            `num_steps` steps.
    """
    if resume != Path(run.output_dir):
        done = checkpoint.read_loop(resume)["step"]
        if run.num_steps < done:
            raise ValueError(
                f"num_steps is {run.num_steps}, but {resume} has {done} steps:\n"
                f"give num_steps of at least {done}, or an older checkpoint with --resume PATH"
            )
    before = read_yaml(resume / CONFIG)
    found = check_resumable(before, parse_yaml(config), str(resume))
    return shorten_list(found, _MOST_CHANGES)


def claim(
    folder: Path, processes: Processes, log: Callable[[str], None], check: Callable[[], object]
) -> Claim | None:
    """Claim a run directory on the main process, and check it there; return None on other ranks.

    Raises:
        ValueError: Another process holds the directory, or the check fails. Every rank raises.
    """
    claimed, refusal = None, {}
    if processes.is_main:
        try:
            claimed = Claim(folder, log)
            check()
        except ValueError as error:
            refusal = {"refused": str(error)}
    if refused := processes.merge(refusal):
        if claimed:
            claimed.release()
        raise ValueError(refused["refused"])
    return claimed


@contextmanager
def begin_directory(folder: Path, config: str) -> Iterator[None]:
    """Write the settings of a new run; if the body raises ValueError, restore the earlier file."""
    path = folder / CONFIG
    earlier = path.read_text() if path.exists() else None
    write_config(folder, config)
    try:
        yield
    except ValueError:
        if earlier is None:
            path.unlink()
        else:
            write_text(path, earlier)
        raise


def write_config(folder: Path, config: str) -> None:
    """Write the settings; an equal file is left as it is, with its comments about origins."""
    path = folder / CONFIG
    if not path.is_file() or read_yaml(path) != parse_yaml(config):
        write_text(path, config)


def clear(folder: Path) -> None:
    """Delete the contents of a run directory, for --overwrite; its lock stays.

    Raises:
        ValueError: The folder does not look like a run directory.
    """
    _check_removable(folder)
    folders.clear(folder, last=CONFIG)


def _check_removable(folder: Path) -> None:
    if not is_unused(folder) and not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} holds no config.yaml, so it is no run directory and is not deleted"
        )

"""Begin, claim and clear run directories, and check that a run may resume with its settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.distributed.processes import Processes
from flowalign.runs.config import Run
from flowalign.training import checkpoint
from flowalign.training.recipe import Recipe
from flowalign.utils import folders
from flowalign.utils.files import bundled, digest_file, write_text
from flowalign.utils.folders import Claim, is_unused, require_removable, require_unused
from flowalign.utils.local_modules import list_files
from flowalign.utils.strict_yaml import parse_yaml, read_yaml
from flowalign.utils.tracking import FILE, read_metrics

ACCEPTED = (
    "num_steps",
    "optimizer",
    "ema",
    "rewards",
    "evaluation",
    "checkpoints",
    "trackers",
    "notify",
    "device",
    "sharding",
    "offload",
    "prompt_cache",
    "text_micro_batch",
    "decode_micro_batch",
    "threads",
    "output_dir",
)
"""Settings that a resumed run may change. Model, recipe and seed must stay, as they determined the
steps so far."""
ACCEPTED_ANYWHERE = (
    *("micro_batch", "gradient_checkpointing", "kept_blocks", "offload_text"),
    "on_failed_reward",
)
"""Component settings that a resumed run may change, as they do not change the expected update."""
_MOST = 3
"""Largest number of differences that a message lists."""
_LONGEST = 60
_NOTHING = object()


@dataclass(frozen=True)
class SettingChange:
    """Setting that differs between two runs."""

    name: str
    """Dotted name, as in overrides."""
    before: Any
    """Earlier value."""
    after: Any
    """Current value."""

    @property
    def accepted(self) -> bool:
        """Return whether a resumed run may change it; True if the earlier value is unknown."""
        parts = self.name.split(".")
        if self.name == "ema":  # averages would begin or end; their settings may change
            return False
        known = self.before is not _NOTHING  # else an earlier version had no such setting
        return parts[0] in ACCEPTED or parts[-1] in ACCEPTED_ANYWHERE or not known

    def __str__(self) -> str:
        return f"{self.name}: {_shorten(self.before)} -> {_shorten(self.after)}"


def find_changes(before: Any, after: Any, name: str = "") -> list[SettingChange]:
    """Return the settings below `name` that differ; for another class, only the class."""
    both = isinstance(before, Mapping) and isinstance(after, Mapping)
    if not both or before.get("class_path") != after.get("class_path"):
        return [SettingChange(name, before, after)] if before != after else []
    found: list[SettingChange] = []
    for key in dict.fromkeys([*before, *after]):
        inside = name if key == "init_args" else f"{name}.{key}".lstrip(".")
        found += find_changes(before.get(key, _NOTHING), after.get(key, _NOTHING), inside)
    return found


def shorten_list(some: Sequence[object], most: int = _MOST) -> list[str]:
    """Return the first items as lines, and the number of remaining items as the last line."""
    shown = [str(one) for one in (some if len(some) <= most else some[: most - 1])]
    more = len(some) - len(shown)
    return [*shown, *([f"and {more} more"] if more else [])]


def check_resumable(
    before: Mapping[str, Any], after: Mapping[str, Any], where: str
) -> list[SettingChange]:
    """Return the differences from the settings of the resumed run.

    Raises:
        ValueError: A setting differs that a resumed run cannot change.
    """
    found = find_changes(before, after)
    if refused := [change for change in found if not change.accepted]:
        listed = "\n".join(shorten_list(refused))
        raise ValueError(
            f"{where} cannot resume with other settings (earlier -> now):\n{listed}\n"
            f"A resumed run may change {', '.join(ACCEPTED)} and every micro_batch."
        )
    return found


def _shorten(value: Any) -> str:
    if value is _NOTHING:
        return "unknown"
    if isinstance(value, Mapping) and "class_path" in value:
        return str(value["class_path"])
    text = "null" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


CONFIG = "config.yaml"
"""File of the complete settings, in run directories and in checkpoints."""
_MOST_CHANGES = 12


def is_opening(folder: Path, recipe: Recipe) -> bool:
    """Return whether a run was killed while its recipe opened; then it needs no --resume."""
    begun = any((folder / name).exists() for name in recipe.open_files)
    trained = (folder / FILE).exists() or any((folder / "checkpoints").glob("*"))
    return begun and not trained


def is_untrained(folder: Path) -> bool:
    """Return whether a run ended before its first step, so that the same command may begin it."""
    if not (folder / CONFIG).is_file() or any((folder / "checkpoints").glob("*")):
        return False
    return all(any(name.startswith("eval/") for name in row) for row in read_metrics(folder))


def check_start(run: Run, config: str, overwrite: bool) -> None:
    """Check that a run may begin in its directory.

    Raises:
        ValueError: The directory holds another run or other files.
    """
    folder = Path(run.output_dir)
    if overwrite:
        require_removable(folder)
    elif is_opening(folder, run.recipe) and (folder / CONFIG).is_file():
        check_resume(run, config, folder)
    elif not is_untrained(folder):
        require_unused(folder)


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
    inputs: list[str] = []
    if resume != Path(run.output_dir):
        loop = checkpoint.read_loop(resume)
        done, inputs = loop["step"], _find_changed_inputs(run, config, loop)
        if run.num_steps < done:
            raise ValueError(
                f"num_steps is {run.num_steps}, but {resume} has {done} steps:\n"
                f"give num_steps of at least {done}, or an older checkpoint with --resume PATH"
            )
    before = read_yaml(resume / CONFIG)
    found = check_resumable(before, parse_yaml(config), str(resume))
    return shorten_list([*inputs, *found], _MOST_CHANGES)


_WEIGHTS = "weights"


def find_latest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run directory; None without one."""
    return checkpoint.latest(folder / "checkpoints")


def find_checkpoint(run: Run, resume: str, whole: bool = False) -> Path | None:
    """Return a checkpoint that has all its files, or the directory of a run that has none yet.

    `resume` is `latest` or a checkpoint. None for an empty directory, in which the run begins.
    `whole` compares the content of all files with their digests.

    Raises:
        ValueError: There is nothing to resume, or the checkpoint is damaged.
    """
    folder = Path(run.output_dir)
    path = find_latest(folder) if resume == "latest" else Path(resume)
    if path is None:
        if (folder / CONFIG).is_file():
            return folder
        if is_unused(folder):
            return None
        raise ValueError(f"nothing to resume: {folder} holds no {CONFIG} and no checkpoint")
    checkpoint.read_loop(path)  # the quick checks, on every process
    if whole:
        checkpoint.check_complete(path)
    return path


def digest_inputs(run: Run, config: str) -> dict[str, str]:
    """Return digests of the prompt files and the user's code of a run, and of the base weights."""
    names = [
        path if Path(bundled(path)).is_file() else path.rpartition(":")[0]
        for path in run.prompt_files
    ]
    files = [*(Path(bundled(name)) for name in names), *list_files(config)]
    digests = {str(file): digest_file(file) for file in files if file.is_file()}
    network = run.policy.network
    return digests | ({_WEIGHTS: network.digest_files()} if network else {})


def _find_changed_inputs(run: Run, config: str, loop: Mapping[str, Any]) -> list[str]:
    """Return the files that changed since a checkpoint.

    Raises:
        ValueError: The base weights changed.
    """
    earlier, now = loop.get("inputs", {}), digest_inputs(run, config)
    changed = [name for name in earlier.keys() & now.keys() if earlier[name] != now[name]]
    if _WEIGHTS in changed:
        raise ValueError(
            f"the model has other weights than in the first {loop['step']} steps, which cannot be "
            "continued: restore them, or choose another output_dir"
        )
    return [f"content of {name} since step {loop['step']}" for name in sorted(changed)]


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
    earlier = path.read_text(encoding="utf-8") if path.exists() else None
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
    require_removable(folder)
    folders.clear(folder, last=CONFIG)

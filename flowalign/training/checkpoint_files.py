"""List the checkpoints of a run, verify their files, and prepare the tensors that they hold."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowalign.utils.files import digest_file
from flowalign.utils.imports import LazyModule

if TYPE_CHECKING:
    from torch.distributed import checkpoint
    from torch.distributed import tensor as dtensor
    from torch.distributed.checkpoint import metadata
else:
    checkpoint = LazyModule("torch.distributed.checkpoint")
    dtensor = LazyModule("torch.distributed.tensor")
    metadata = LazyModule("torch.distributed.checkpoint.metadata")

MANIFEST = "manifest.json"
"""File of a checkpoint that lists its other files."""
_STATE = "state/"
PREFIX = "step-"
"""Prefix of checkpoint names, before the number of steps."""


def list_by_step(root: Path) -> list[Path]:
    """Return all checkpoints, oldest first; folders with other names are ignored."""
    steps = {f: f.name.removeprefix(PREFIX) for f in root.glob(f"{PREFIX}*")}
    return sorted((f for f in steps if steps[f].isdecimal()), key=lambda f: int(steps[f]))


def latest(root: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None."""
    found = list_by_step(root)
    return found[-1] if found else None


def write_manifest(folder: Path) -> None:
    """Write size and SHA-256 of every file of a checkpoint to its manifest."""
    files = {
        str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": digest_file(f)}
        for f in sorted(folder.rglob("*"))
        if f.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")


def check_complete(folder: Path) -> None:
    """Compare the size and SHA-256 of every file with the manifest.

    Raises:
        ValueError: A file is missing, truncated or modified. The message names the newest intact
            checkpoint of the run.
    """
    check_files(folder, lambda _: True)


def require_weights(folder: Path) -> None:
    """Raise ValueError unless the folder of `--weights` exists."""
    if folder.is_dir():
        return
    why = f"--weights {str(folder)!r} is not a folder (looked in {Path.cwd()})"
    if folder.name == "ema" and folder.parent.is_dir():
        why = f"{folder.parent} has no averaged weights, because the run sets ema: null;\ngive "
        why += f"--weights {folder.parent}"
    raise ValueError(why)


def check_weights(folder: Path) -> None:
    """Compare weights with the manifest of their checkpoint, if there is one.

    `folder` is a checkpoint, its `ema` folder, or another folder without a manifest.

    Raises:
        ValueError: A file of the checkpoint is missing, truncated or modified.
    """
    for root in (folder, folder.parent):
        if (root / MANIFEST).is_file() and (root / "state").is_dir():
            check_files(root, lambda name: not name.startswith(_STATE))


def check_files(folder: Path, read: Callable[[str], bool]) -> None:
    """Raise ValueError unless all sizes match, and the digests of the files that `read` selects."""
    if problem := _find_damage(folder, read):
        raise ValueError(f"{problem}\n{_way_out(folder)}")


def _find_damage(folder: Path, read: Callable[[str], bool]) -> str:
    """Return a description of the damage of a checkpoint, or an empty string."""
    if not (folder / MANIFEST).is_file():
        return f"{folder} is no complete checkpoint: {MANIFEST} is missing"
    try:
        files = json.loads((folder / MANIFEST).read_bytes())
        wanted = {name: (about["bytes"], about["sha256"]) for name, about in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"checkpoint {folder} is damaged: {MANIFEST} lists no files with size and SHA-256"
    for name, (size, digest) in wanted.items():
        file = folder / name
        have = file.stat().st_size if file.is_file() else None
        if have != size:
            return f"checkpoint {folder} is damaged: {name} has {have} of {size} bytes"
        if read(name) and digest_file(file) != digest:
            return (
                f"checkpoint {folder} is damaged: {name} has its {size} bytes, "
                "but not the content that was written"
            )
    return ""


def _way_out(folder: Path) -> str:
    """Return advice to resume from the run's newest intact checkpoint."""
    for other in reversed(list_by_step(folder / "checkpoints") or list_by_step(folder.parent)):
        if other != folder and not _find_damage(other, lambda _: True):
            return f"The newest intact checkpoint is {other}; to resume from it: --resume {other}"
    return "No other checkpoint of this run is intact."


def check_start(path: str, key: str) -> None:
    """Raise ValueError unless the weights of a checkpoint are intact; `key` names its setting."""
    if not Path(path).is_dir():
        raise ValueError(
            f"{key}: the checkpoint {path!r} does not exist (looked in {Path.cwd()}): train it "
            "first, or name a folder such as runs/RUN/checkpoints/step-000100"
        )
    try:
        check_weights(Path(path))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


FOLDER = "sharded"
"""Folder of the sharded files inside a checkpoint's `state`."""


def save_sharded(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors, one file per process; all processes must call this.

    Any number of processes can read the files.
    """
    checkpoint.save(dict(tensors), checkpoint_id=folder)


def shapes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and shape of every written tensor."""
    found = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (about.properties.dtype, about.size)
        for name, about in found.items()
        if isinstance(about, metadata.TensorStorageMetadata)
    }


def read_sharded(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read all tensors in `like`, each sharded like its counterpart there.

    All processes must call this.
    """
    made = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    checkpoint.load(made, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return made


def divided(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return a tensor sharded like `like`; scalars and tensors without a shard stay whole."""
    if not isinstance(like, dtensor.DTensor) or tensor.dim() == 0:
        return tensor
    return dtensor.distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def state_tensors(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter, by name; integers become tensors."""
    kept = optimizer.state.get(p, {})
    return {name: torch.as_tensor(value).detach() for name, value in kept.items()}


def check_moments(kind: str, names: Collection[str]) -> None:
    """Check that the moments in a checkpoint, given by tensor names, fit the optimizer.

    Raises:
        ValueError: Either the checkpoint or the optimizer has 8-bit moments, but not both.
    """
    found = {name.rpartition(":")[2] for name in names if "optimizer." in name}
    if found and ("state1" in found) != (kind == "adamw_8bit"):
        before = "in 8 bits" if "state1" in found else "in float32"
        raise ValueError(
            f"optimizer.kind is {kind}, but the checkpoint has moments {before}: set the kind of "
            "the checkpoint's run"
        )


def put_back(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Restore the results of `state_tensors`, keyed by the index of the parameter."""
    plain = {
        number: {name: _plain(value) for name, value in kept.items()}
        for number, kept in state.items()
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": plain, "param_groups": groups})


def _plain(value: Tensor) -> Tensor | int:
    counts = value.dim() == 0 and not value.is_floating_point()
    return int(value) if counts else value

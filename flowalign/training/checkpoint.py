"""Write checkpoints to a temporary folder and rename it, so that they are never incomplete.

A resumed run continues bit for bit.

    step-000120/
        pytorch_lora_weights.safetensors   for `pipe.load_lora_weights` and ComfyUI
        adapter_model.safetensors          for PEFT, with adapter_config.json; exact
        ema/                               the same files of the averaged weights
        state/training.safetensors         parameters, averages and optimizer moments in float32
        state/sharded/                     the same tensors, if they are sharded
        state/loop.json                    step, counters, costs
        config.yaml
        manifest.json                      size and SHA-256 of every file above
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flowalign.training.learner import Learner
from flowalign.utils.errors import explain_errors
from flowalign.utils.files import digest_file, sync_file, sync_tree
from flowalign.utils.imports import LazyModule
from flowalign.utils.ranges import NonNegativeInt, PositiveInt, Settings

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
FOLDER = "sharded"
"""Folder of the sharded files inside a checkpoint's `state`."""
_COUNTERS = ("num_updates", "num_skipped", "skipped_in_a_row")


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Settings, key="checkpoints"):
    """Schedule of checkpoints; the last step is always saved."""

    every: PositiveInt = 50
    """Number of training steps between two checkpoints."""
    keep: NonNegativeInt = 3
    """Number of newest checkpoints to keep. 0: all."""
    verify: Literal["never", "first_and_last", "always"] = "first_and_last"
    """Checkpoints to verify by loading them in the model's pipeline and comparing the outputs,
    which must be equal. first_and_last: the first and the final one of the run."""


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
    with explain_errors(key):
        check_weights(Path(path))


def save(root: Path, step: int, learner: Learner, config: str, loop: Mapping[str, Any]) -> Path:
    """Write the state after `step` steps; if weights are sharded, all processes must call this.

    Raises:
        OSError: The disk is full or not writable; earlier checkpoints are untouched.
    """
    final = root / f"{PREFIX}{step:06d}"
    partial = root / f".{final.name}.tmp"
    main = learner.processes.is_main
    if main:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "state").mkdir(parents=True)
        (partial / "ema").mkdir() if learner.ema else None
    try:
        _write_weights(partial, learner)
        if main:
            counters = json.dumps({"step": step, **_counters(learner), **loop}, indent=1)
            (partial / "state" / "loop.json").write_text(counters, encoding="utf-8")
            (partial / "config.yaml").write_text(config, encoding="utf-8")
            write_manifest(partial)
            put_in_place(partial, final)
    except SafetensorError as error:  # safetensors raises this for a full disk
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True) if main else None
    return final


def _write_weights(partial: Path, learner: Learner) -> None:
    if learner.is_sharded:
        learner.processes.barrier()  # wait until the folder exists
    learner.policy.save_weights(str(partial))
    if learner.ema:
        with learner.averaged("ema"):
            learner.policy.save_weights(str(partial / "ema"))
    if learner.is_sharded:
        checkpoint.save(_tensors(learner), checkpoint_id=partial / "state" / FOLDER)
        learner.processes.barrier()  # wait until all processes have written
    else:
        tensors = {n: t.cpu().contiguous().clone() for n, t in _tensors(learner).items()}
        save_file(tensors, partial / "state" / "training.safetensors")


def put_in_place(partial: Path, final: Path) -> None:
    """Flush the folder to disk, then rename it.

    An existing checkpoint of the same step stays until the new one has its name. Without the flush,
    a power failure could leave empty files under the new name.
    """
    sync_tree(partial)
    old = partial.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    try:
        os.replace(partial, final)
    except OSError:
        if old.exists():
            os.replace(old, final)
        raise
    sync_file(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path, learner: Learner) -> dict[str, Any]:
    """Restore everything that `save` wrote, and return the state of the loop.

    Raises:
        ValueError: The checkpoint is damaged, or belongs to another model or recipe.
    """
    if learner.processes.is_main:  # one check is enough, all processes read the same files
        check_complete(folder)
    loop = read_loop(folder)
    wanted = _tensors(learner)
    got = _read(folder / "state", learner)
    names = set(got)
    check_moments(learner.cfg.kind, names)
    differ = {n for n in names ^ wanted.keys() if "optimizer." not in n}
    differ |= {n for n in names & wanted.keys() if got[n].shape != wanted[n].shape}
    if differ:
        raise ValueError(
            f"checkpoint {folder} belongs to another model or adapter: "
            f"{len(differ)} tensors differ,\nfor example {min(differ)}"
        )
    _write_back(learner, got, loop)
    return loop


def read_loop(folder: Path) -> dict[str, Any]:
    """Return step, counters and loop state of a checkpoint.

    Raises:
        ValueError: A file is missing or truncated, or `state/loop.json` is damaged.
    """
    check_files(folder, lambda name: name == "state/loop.json")
    return json.loads((folder / "state" / "loop.json").read_text(encoding="utf-8"))


def prune(root: Path, keep: int) -> None:
    """Remove all except the newest `keep` checkpoints; 0 keeps all."""
    for old in list_by_step(root)[:-keep] if keep else []:
        shutil.rmtree(old)


def _counters(learner: Learner) -> dict[str, Any]:
    """Return the counters of training as JSON values, including those of companions."""
    counters: dict[str, Any] = {name: getattr(learner, name) for name in _COUNTERS}
    counters["average_updates"] = {n: a.num_updates for n, a in learner.averages.items()}
    counters["scaler"] = learner.scaler.state_dict()
    if learner.companions:
        counters["companions"] = {n: _counters(c) for n, c in learner.companions.items()}
    return counters


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """Return every tensor that training changes, by name; companions' names are prefixed."""
    out = {f"parameter.{n}": p.detach() for n, p in learner.named.items()}
    for kind, kept in learner.averages.items():
        pairs = zip(learner.named, kept.average, strict=True)
        out |= {f"{kind}.{n}": a for n, a in pairs}
    for name, p in learner.named.items():
        for key, value in state_tensors(learner.optimizer, p).items():
            out[f"optimizer.{name}:{key}"] = value
    for name, companion in learner.companions.items():
        out |= {f"{name}/{n}": t for n, t in _tensors(companion).items()}
    return out


def _read(state: Path, learner: Learner) -> dict[str, Tensor]:
    """Read the tensors, sharded like those of the learner; all processes must call this."""
    folder, parameters = state / FOLDER, {n: p.detach() for n, p in learner.named.items()}

    def find_parameter(name: str) -> Tensor | None:
        return parameters.get(name.partition(".")[2].partition(":")[0])

    if not folder.is_dir():
        with safe_open(state / "training.safetensors", "pt") as file:
            whole = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {n: _shard_like(t, find_parameter(n)) for n, t in whole.items()}
    made = {}
    for name, about in (
        checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    ):
        if isinstance(about, metadata.TensorStorageMetadata):
            like = find_parameter(name)
            if like is None or like.shape != about.size:  # a counter, or a tensor of another model
                like = torch.empty(about.size, dtype=about.properties.dtype)
            made[name] = torch.empty_like(like)
    checkpoint.load(made, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return made


def _shard_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return a tensor sharded like `like`; scalars and tensors without a shard stay whole."""
    if not isinstance(like, dtensor.DTensor) or tensor.dim() == 0:
        return tensor
    return dtensor.distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def state_tensors(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter, by name; integers become tensors."""
    kept = optimizer.state.get(p, {})
    return {name: torch.as_tensor(value).detach() for name, value in kept.items()}


def check_moments(kind: str, names: Collection[str]) -> None:
    """Raise ValueError if either the checkpoint or the optimizer has 8-bit moments, but not both.

    `names` are the names of the tensors in the checkpoint.
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

    def plain(value: Tensor) -> Tensor | int:
        counts = value.dim() == 0 and not value.is_floating_point()
        return int(value) if counts else value

    values = {i: {name: plain(value) for name, value in kept.items()} for i, kept in state.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


@torch.no_grad()
def _write_back(learner: Learner, got: Mapping[str, Tensor], loop: Mapping[str, Any]) -> None:
    for name, p in learner.named.items():
        p.copy_(got[f"parameter.{name}"])
    for kind, kept in learner.averages.items():
        for name, average in zip(learner.named, kept.average, strict=True):
            average.copy_(got[f"{kind}.{name}"])
        kept.num_updates = loop["average_updates"][kind]
    state: dict[int, dict[str, Tensor]] = {}
    for i, name in enumerate(learner.named):
        prefix = f"optimizer.{name}:"
        keys = [n for n in got if n.startswith(prefix)]
        if keys:
            state[i] = {n.removeprefix(prefix): got[n] for n in keys}
    put_back(learner.optimizer, state)
    learner.scaler.load_state_dict(loop["scaler"]) if loop["scaler"] else None
    for name in _COUNTERS:
        setattr(learner, name, loop[name])
    for name, companion in learner.companions.items():
        prefix = f"{name}/"
        own = {n.removeprefix(prefix): t for n, t in got.items() if n.startswith(prefix)}
        _write_back(companion, own, loop["companions"][name])

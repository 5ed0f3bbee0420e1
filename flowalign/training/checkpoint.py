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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowalign.training.checkpoint_files import (
    FOLDER,
    PREFIX,
    check_complete,
    check_files,
    check_moments,
    check_weights,
    divided,
    latest,
    list_by_step,
    put_back,
    read_sharded,
    save_sharded,
    shapes,
    state_tensors,
    write_manifest,
)
from flowalign.training.learner import Learner
from flowalign.types.ranges import NonNegativeInt, PositiveInt, require_ranges
from flowalign.utils.files import sync_file, sync_tree

__all__ = [
    "Checkpoints",
    "check_complete",
    "check_weights",
    "latest",
    "prune",
    "read_loop",
    "restore",
    "save",
    "write_manifest",
]
_COUNTERS = ("num_updates", "num_skipped", "skipped_in_a_row")


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Schedule of checkpoints; the last step is always saved."""

    every: PositiveInt = 50
    """Number of training steps between two checkpoints."""
    keep: NonNegativeInt = 3
    """Number of newest checkpoints to keep. 0: all."""
    verify: Literal["never", "first_and_last", "always"] = "first_and_last"
    """Checkpoints to verify by loading them in the model's pipeline and comparing the outputs,
    which must be equal. first_and_last: the first and the final one of the run."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "checkpoints")


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
            _write_counters(partial, step, learner, config, loop)
            _put_in_place(partial, final)
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
        save_sharded(_tensors(learner), partial / "state" / FOLDER)
        learner.processes.barrier()  # wait until all processes have written
    else:
        tensors = {n: t.cpu().contiguous().clone() for n, t in _tensors(learner).items()}
        save_file(tensors, partial / "state" / "training.safetensors")


def _write_counters(
    partial: Path, step: int, learner: Learner, config: str, loop: Mapping[str, Any]
) -> None:
    counters = {"step": step, **_counters(learner), **loop}
    text = json.dumps(counters, indent=1)
    (partial / "state" / "loop.json").write_text(text, encoding="utf-8")
    (partial / "config.yaml").write_text(config, encoding="utf-8")
    write_manifest(partial)


def _put_in_place(partial: Path, final: Path) -> None:
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
    """Read the tensors, sharded like those of the learner."""
    parameters = {n: p.detach() for n, p in learner.named.items()}
    if not (state / FOLDER).is_dir():
        with safe_open(state / "training.safetensors", "pt") as file:
            whole = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {n: divided(t, parameters.get(_named(n))) for n, t in whole.items()}
    like = {}
    for name, (dtype, shape) in shapes(state / FOLDER).items():
        like[name] = parameters.get(_named(name), torch.empty(()))
        if like[name].shape != shape:  # an optimizer counter, or a tensor of another model
            like[name] = torch.empty(shape, dtype=dtype)
    return read_sharded(state / FOLDER, like)


def _named(name: str) -> str:
    """Return the name of the parameter that a tensor belongs to."""
    return name.partition(".")[2].partition(":")[0]


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

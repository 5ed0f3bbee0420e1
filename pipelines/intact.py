"""Says which part of a pipeline's folder is missing, damaged or of another family."""

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError
from torch import nn

from pipelines.folder import file_in, read_json
from pipelines.tensors import dequantized

_INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_REFUSALS = (
    *(AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)
"""What these libraries raise for files that they cannot read."""
_LONGEST = 240


def check_folder(
    pipeline: type[DiffusionPipeline], path: str, part: str, network: str, unused: Collection[str]
) -> None:
    """Check that a local folder is one of this family, by its configuration files.

    Raises:
        ValueError: `part` is not the class `network`, or a part is missing or another family's.
    """
    if not Path(path).exists():
        return
    components = parts_of(pipeline, path)
    reason = _strangeness(pipeline, path, part, network, unused)
    if reason:
        raise ValueError(
            f"{path} is no {pipeline.__name__} folder, but of another family: {reason}"
        )
    for name in components.keys() - set(unused):
        if not (Path(path) / name).is_dir():
            raise ValueError(f"{path} is no {pipeline.__name__} folder: {name}/ is missing")
        _check_configurations(Path(path) / name, *components[name])


def check_channels(policy: Any, transformer: Mapping[str, Any], given: int, kinds: str) -> None:
    """Check that the network of a policy takes as many channels as it is given.

    Raises:
        ValueError: It takes others; the message names the policies of each of the `kinds`.
    """
    if transformer["in_channels"] != given:
        raise ValueError(
            f"the network of {policy.path} takes {transformer['in_channels']} channels, "
            f"{type(policy).__name__} gives it {given}:\n{kinds}"
        )


def _strangeness(
    pipeline: type[DiffusionPipeline], path: str, part: str, network: str, unused: Collection[str]
) -> str | None:
    """Return what such a pipeline would not have or would lack."""
    parameters = inspect.signature(pipeline.__init__).parameters
    index, components = read_json(Path(path) / _INDEX), parts_of(pipeline, path)
    found = components.get(part, ("", "missing"))[1]
    if found != network:
        return f"its {part} is {found}, not {network}"
    strangers = components.keys() - parameters.keys()
    if encoders := sorted(name for name in strangers if name.startswith("text_encoder")):
        return f"it has {encoders[0]}"
    needed = {n for n, p in parameters.items() if n != "self" and p.default is p.empty}
    lacking = sorted(needed - index.keys() - set(unused))
    return f"it lacks {lacking[0]}" if lacking else None


def _check_configurations(folder: Path, library: str, kind: str) -> None:
    """Check that a part's configuration files can be read, and name classes that diffusers has."""
    for file in sorted(folder.glob("*config.json")):
        config = read_json(file)
        if library != "diffusers":
            continue
        unknown = {kind, config.get("_class_name", "without _class_name")} - {*dir(diffusers)}
        if unknown:
            raise ValueError(f"{file} is damaged: diffusers has no class {min(unknown)}")


def parts_of(pipeline: type[DiffusionPipeline], path: str) -> dict[str, tuple[str, str]]:
    """Return library and class of every part that a pipeline has, by name."""
    file = Path(path) / _INDEX
    if not Path(path).exists():
        file = file_in(path, _INDEX)
    elif not file.is_file():
        raise ValueError(f"{path} is no {pipeline.__name__} folder: {file.name} is missing")
    pairs = {k: v for k, v in read_json(file).items() if isinstance(v, list) and len(v) == 2}
    return {
        name: (library, kind) for name, (library, kind) in pairs.items() if isinstance(kind, str)
    }


@contextmanager
def named_refusals(
    pipeline: type[DiffusionPipeline], path: str, given: Collection[str]
) -> Iterator[None]:
    """Turn what libraries raise while they load a pipeline into one ValueError that names the part.

    To find it, the parts are loaded once more, one at a time, except those that are `given`.
    """
    try:
        yield
    except _REFUSALS as error:
        where, why = _culprit(pipeline, path, given) or (pipeline.__name__, error)
        raise ValueError(f"{path} cannot be loaded: {where}: {_short(why)}") from error


@contextmanager
def named_gaps(path: str) -> Iterator[None]:
    """Turn the lack of a setting in a configuration, or one of a wrong type, into ValueError."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: the configurations of its parts do not fit: {type(error).__name__}: "
            + _short(error)
        ) from error


def check_complete(path: str, name: str, part: nn.Module) -> None:
    """Check that a part's files held all of its tensors."""
    absent = [n for n, p in part.named_parameters() if p.is_meta]
    if absent:
        raise ValueError(
            f"{path} cannot be loaded: {name}: {len(absent)} tensors are missing, for example "
            f"{absent[0]}"
        )


@torch.no_grad()
def check_finite(path: str, components: Mapping[str, Any]) -> None:
    """Check that no part has weights that are NaN or infinite."""
    for name, part in components.items():
        for tensor, p in part.named_parameters() if isinstance(part, nn.Module) else ():
            if not p.is_meta and not dequantized(p).isfinite().all():
                raise ValueError(f"{path}: {name} has weights that are not finite, in {tensor}")


def _culprit(
    pipeline: type[DiffusionPipeline], path: str, given: Collection[str]
) -> tuple[str, BaseException] | None:
    """Return the first part of a local folder that cannot be loaded by itself, and why."""
    if not Path(path).exists():
        return None
    for name, (library, kind) in parts_of(pipeline, path).items():
        if name in given or library not in _LIBRARIES:
            continue
        try:
            getattr(importlib.import_module(library), kind).from_pretrained(path, subfolder=name)
        except _REFUSALS as error:
            return name, error
    return None


def _short(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."

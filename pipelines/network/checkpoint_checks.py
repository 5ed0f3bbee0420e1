"""Reports the component of a pipeline folder that is missing, damaged or from another family."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from flowalign.utils.files import read_object
from pipelines.parts.folder import Folder
from pipelines.parts.libraries import diffusers, transformers
from pipelines.parts.tensors import dequantize

_LIBRARIES = ("diffusers", "transformers")
_REFUSALS = (
    *(AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError),
    SafetensorError,
    UnpicklingError,
)
"""Errors that these libraries raise for files that they cannot read."""
_LONGEST = 240
_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""Names of the files with weights, without endings."""
_LFS = b"version https://git-lfs"


def check_folder(folder: Folder, denoiser: str, kind: str) -> None:
    """Check from configs that a local folder or a published model belongs to this family.

    Raises:
        ValueError: The component `denoiser` is not of class `kind`, or a component is missing or
            belongs to another family.
    """
    is_local = Path(folder.root).exists()
    if not is_local and not folder.published:
        return
    components = folder.components()
    if reason := _describe_mismatch(folder, denoiser, kind):
        raise ValueError(f"{folder.path} belongs to another family than {folder.kind}: " + reason)
    for name in components.keys() - set(folder.skipped) if is_local else ():
        if not (Path(folder.root) / name).is_dir():
            raise ValueError(folder.refuse(f"{name}/ is missing"))
        _check_configurations(Path(folder.root) / name, *components[name])


def _describe_mismatch(folder: Folder, denoiser: str, kind: str) -> str | None:
    """Return the first difference between the folder and its pipeline class, or None."""
    parameters = inspect.signature(folder.pipeline.__init__).parameters
    components = folder.components()
    own_kind = components.get(denoiser, ("", "missing"))[1]
    if own_kind != kind.rpartition(".")[2]:
        return f"its {denoiser} is {own_kind}, not {kind}"
    unexpected = components.keys() - parameters.keys()
    if encoders := sorted(name for name in unexpected if name.startswith("text_encoder")):
        return f"it has {encoders[0]}"
    needed = {n for n, p in parameters.items() if n != "self" and p.default is p.empty}
    lacking = sorted(needed - components.keys() - set(folder.skipped))
    return f"it lacks {lacking[0]}" if lacking else None


def _check_configurations(folder: Path, library: str, kind: str) -> None:
    """Check that a component's configuration files are readable and name classes of diffusers."""
    for file in sorted(folder.glob("*config.json")):
        config = read_object(file)
        if library != "diffusers":
            continue
        unknown = {kind, config.get("_class_name", "without _class_name")} - {*dir(diffusers)}
        if unknown:
            raise ValueError(f"{file} is damaged: diffusers has no class {min(unknown)}")


def check_headers(folder: Folder, unread: Collection[str] = ()) -> None:
    """Compare the tensors in the weight files of a local folder with those of its networks.

    Only the headers of files are read. Components with a name prefix in `unread` are left out, and
    folders that hold configurations alone.

    Raises:
        ValueError: A file is missing or damaged, or tensors are missing or have other shapes.
    """
    there = {file.suffix for file in Path(folder.root).glob("*/*")}
    if folder.loaded or not there & {".safetensors", ".bin"}:
        return
    for name, (library, kind) in folder.components().items():
        if library in _STEMS and name not in folder.skipped and not name.startswith((*unread, "/")):
            place = Path(folder.root, name)
            files = tuple((file, file.stat().st_mtime_ns) for file in sorted(place.iterdir()))
            if problem := _find_problem(place, library, kind, files):
                raise ValueError(f"{folder.path} cannot be loaded: {name}: {problem}")


@lru_cache(maxsize=256)
def _find_problem(place: Path, library: str, kind: str, _files: object) -> str:
    """Return the problem of a component's weight files, or an empty text."""
    cls, stem = getattr(import_module(library), kind, None), _STEMS[library]
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        return ""  # a tokenizer
    single, index = place / f"{stem}.safetensors", place / f"{stem}.safetensors.index.json"
    config = read_object(place / "config.json")
    if index.is_file() and (library == "diffusers" or not single.is_file()):
        files = sorted({place / file for file in read_object(index)["weight_map"].values()})
    elif not single.is_file() and any(place.glob("*pytorch_model.bin*")):
        return ""  # a format without header
    else:
        files = [single]
    try:
        headers = _read_headers(files)
    except (SafetensorError, OSError) as error:
        return _describe_file(files, error)
    if "quantization_config" in config:
        return ""  # packed tensors
    absent, other = (
        _compare_diffusers(cls, config, headers)
        if library == "diffusers"
        else _compare_transformers(cls, place, headers)
    )
    if absent:
        return f"{len(absent)} tensors are missing, for example {min(absent)}"
    return f"{len(other)} tensors have another shape, for example {min(other)}" if other else ""


def _read_headers(files: Collection[Path]) -> dict[str, Any]:
    """Return the tensors of safetensors files on the meta device."""
    found: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (a file is no mapping)
                shape = opened.get_slice(name).get_shape()
                found[name] = torch.empty(shape, device="meta")
    return found


def _describe_file(files: Collection[Path], error: Exception) -> str:
    """Return which file is missing, a pointer or damaged."""
    for file in files:
        if not file.is_file():
            there = ", ".join(sorted(one.name for one in file.parent.iterdir()))
            return f"{file.name} is missing; there are {there or 'no files'}"
        with file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                return f"{file.name} is a pointer of Git LFS: run `git lfs pull` in its folder"
    return f"a safetensors file is damaged: {error}"


def _compare_diffusers(
    cls: Any, config: dict[str, Any], headers: dict[str, Any]
) -> tuple[Collection[str], Collection[str]]:
    """Return the names of missing tensors, and of tensors with another shape."""
    with torch.device("meta"):
        network = cls.from_config(config)
    network._fix_state_dict_keys_on_load(headers)  # names of attention layers in old files
    wanted = dict(network.named_parameters())
    there = headers.keys() & wanted.keys()
    return wanted.keys() - there, {n for n in there if headers[n].shape != wanted[n].shape}


def _compare_transformers(
    cls: Any, place: Path, headers: dict[str, Any]
) -> tuple[Collection[str], Collection[str]]:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it would print a table
    _, about = cls.from_pretrained(
        None,
        config=cls.config_class.from_pretrained(place),
        state_dict=headers,
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return about["missing_keys"], {name for name, *_ in about["mismatched_keys"]}


@contextmanager
def loading_context(folder: Folder, given: Collection[str]) -> Iterator[None]:
    """Turn errors of loading a pipeline into one ValueError that names the component.

    To find it, each component that is not in `given` is loaded once more, one at a time.
    """
    try:
        yield
    except _REFUSALS as error:
        place, cause = _find_culprit(folder, given) or (folder.kind, error)
        raise ValueError(f"{folder.path} cannot be loaded: {place}: {_shorten(cause)}") from error


@contextmanager
def missing_keys_context(path: str) -> Iterator[None]:
    """Turn a missing or mistyped setting of a config into ValueError."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: the configs of its components do not fit: {type(error).__name__}: "
            + _shorten(error)
        ) from error


def check_complete(path: str, name: str, part: nn.Module) -> None:
    """Raise ValueError if a component's files lack some of its tensors.

    diffusers leaves missing tensors on the meta device. transformers fills them with random values,
    and marks only the tensors that it read or tied.
    """
    marked = isinstance(part, transformers.PreTrainedModel)
    absent = [
        name
        for name, p in part.named_parameters()
        if p.is_meta or (marked and not hasattr(p, "_is_hf_initialized"))
    ]
    if absent:
        raise ValueError(
            f"{path} cannot be loaded: {name}: {len(absent)} tensors are missing, for example "
            f"{absent[0]}"
        )


@torch.no_grad()
def check_finite(path: str, components: Mapping[str, Any]) -> None:
    """Raise ValueError if a component has NaN or infinite weights."""
    for name, part in components.items():
        for tensor, p in part.named_parameters() if isinstance(part, nn.Module) else ():
            if not p.is_meta and not dequantize(p).isfinite().all():
                raise ValueError(f"{path}: {name} has weights that are not finite, in {tensor}")


def _find_culprit(folder: Folder, given: Collection[str]) -> tuple[str, BaseException] | None:
    """Return the first component of a local folder that fails to load, and its error."""
    if not Path(folder.path).exists():
        return None
    for name, (library, _) in folder.components().items():
        if name in given or library not in _LIBRARIES:
            continue
        try:
            folder.read(name)
        except _REFUSALS as error:
            return name, error
    return None


def _shorten(error: BaseException) -> str:
    if isinstance(error, UnpicklingError):  # torch advises to load it regardless
        return "a .bin file holds more than tensors and could run code: convert it to safetensors"
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."

"""Reads published weights safely, and accounts for every key."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import UnpicklingError  # only caught: pickles are never loaded
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flowalign.utils.errors import explain_errors
from flowalign.utils.files import bundled, read_object
from flowalign.utils.hub import contact, file_of, why_not
from reward_models.backbones.libraries import accelerate, transformers

Renames = Sequence[tuple[str, str]]
"""Regular expressions with their replacements, applied to every key in this order."""


def find_file(source: str, name: str | None = None) -> Path:
    """Return a local file, the file `name` in a local folder, or that file from a hub repository.

    Raises:
        ValueError: `source` is none of them. The message names it.
    """
    path = Path(bundled(source))
    if path.is_file():
        return path
    if path.is_dir() and name is not None and (path / name).is_file():
        return path / name
    if path.exists() or name is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(
            f"{source}: no such file" + (f", nor a folder with {name}" if name else "")
        )
    return file_of(source, name)


def find_folder(source: str, only: Sequence[str] | None = None) -> Path:
    """Return a local folder, or a local copy of a hub repository.

    From a repository only files that match the patterns `only`, such as `*.json`, are fetched.

    Raises:
        ValueError: `source` is neither.
    """
    path = Path(bundled(source))
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"{source}: no such folder")
    contact()
    patterns = list(only) if only else None
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns))
    except OSError as error:
        raise ValueError(why_not(source, "all of it", error)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, a sharded index, or a torch file without pickle.

    Raises:
        ValueError: The file is truncated, is not a checkpoint, or holds anything other than
            tensors.
    """
    try:
        if path.name.endswith(".index.json"):
            shards = sorted(set(read_object(path)["weight_map"].values()))
            return {k: v for shard in shards for k, v in read_tensors(path.parent / shard).items()}
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, KeyError, ValueError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    except UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors; it is not loaded") from error
    for wrapper in ("state_dict", "model"):
        inside = content.get(wrapper) if isinstance(content, Mapping) else None
        content = inside if isinstance(inside, Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} is not a mapping of names to tensors")
    return dict(content)


def read_weights(source: str) -> dict[str, Tensor]:
    """Read all tensors of a transformers model from a local folder or a hub repository."""
    names = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    folder = find_folder(source, ("model*.safetensors", "model.safetensors.index.json"))
    if not Path(bundled(source)).is_dir() and not any((folder / name).exists() for name in names):
        folder = find_folder(source, ("pytorch_model*",))
    for name in names:
        if (folder / name).is_file():
            return read_tensors(folder / name)
    raise ValueError(f"{source} holds no weights; expected one of {', '.join(names)}")


def read_transformers(kind: Any, source: str | Path, **settings: Any) -> Any:
    """Load a transformers model with a class such as AutoModel, and account for every key.

    Raises:
        ValueError: The folder or hub repository cannot be read, or its weights do not fit.
    """
    with explain_errors(f"{source} cannot be read", OSError, RuntimeError, SafetensorError):
        network, info = kind.from_pretrained(
            find_folder(str(source)), output_loading_info=True, use_safetensors=True, **settings
        )
    _refuse_misfits(
        network,
        source,
        {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "of another shape": [str(key[0]) for key in info["mismatched_keys"]],
            "not finite": [k for k, p in network.named_parameters() if not p.isfinite().all()],
        },
    )
    return network


def read_tokenizer(source: str) -> Any:
    """Read the tokenizer of a model in the layout of transformers."""
    folder = find_folder(source, ("*.json", "*.txt", "*.safetensors"))
    return transformers.AutoTokenizer.from_pretrained(folder)


def require_settings(
    config: Mapping[str, Any], supported: Mapping[str, Any], source: str | Path
) -> None:
    """Raise ValueError if a config has another value; `a.b` is the setting b in its part a."""
    for name, value in supported.items():
        part, _, key = name.rpartition(".")
        found = (config.get(part, {}) if part else config).get(key)
        if found != value:
            raise ValueError(f"{name} of {source} is {found!r}; only {value!r} is supported")


def to_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert 16-bit floating-point tensors to float32 and leave all others unchanged."""
    half = (torch.float16, torch.bfloat16)
    return {key: value.float() if value.dtype in half else value for key, value in tensors.items()}


def on_meta_device() -> AbstractContextManager[None]:
    """Build modules in this context without memory for parameters; `load_exactly` fills them.

    Their buffers are real, because checkpoints often lack buffers such as positions and masks.
    """
    return accelerate.init_empty_weights(include_buffers=False)


def fingerprint_of(source: str | None) -> str:
    """Return an identifier of weights: a hash of local content, or the name of a hub repository.

    For a large file, the hash covers 64 pieces of 64 KiB spread over it.
    """
    path = Path(bundled(source or ""))
    if not source or not path.exists():
        return source or ""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}".encode())
        with file.open("rb") as stream:
            for start in sorted({i * max(size - 2**16, 0) // 63 for i in range(64)}):
                stream.seek(start)
                digest.update(stream.read(2**16))
    return digest.hexdigest()[:16]


def rename_tensors(tensors: Mapping[str, Tensor], renames: Renames) -> dict[str, Tensor]:
    """Return the tensors under the names that a module uses.

    Raises:
        ValueError: Two keys get the same name.
    """
    result: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        for pattern, replacement in renames:
            key = re.sub(pattern, replacement, key)
        if key in result:
            raise ValueError(f"two tensors of the checkpoint are both named {key}")
        result[key] = tensor
    return result


def load_exactly(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    source: str | Path,
    unused: Sequence[str] = (),
) -> None:
    """Load weights and account for every key: none missing, unexpected or misshapen.

    `unused` are regular expressions of checkpoint keys that may be ignored. A module on the meta
    device takes the checkpoint's tensors themselves, in their dtype.

    Raises:
        ValueError: Some keys do not fit. The message names the first few.
    """
    wanted = module.state_dict()
    given = {
        k: v
        for k, v in tensors.items()
        if k in wanted or not any(re.fullmatch(pattern, k) for pattern in unused)
    }
    fits = {k: v for k, v in given.items() if k in wanted and v.shape == wanted[k].shape}
    _refuse_misfits(
        module,
        source,
        {
            "missing": [k for k in wanted if k not in given],
            "unexpected": [k for k in given if k not in wanted],
            "of another shape": [k for k in given if k in wanted and k not in fits],
            "not finite": [k for k, v in fits.items() if not v.isfinite().all()],
        },
    )
    empty = any(parameter.is_meta for parameter in module.parameters())
    module.load_state_dict(dict(given), strict=False, assign=empty)


def _refuse_misfits(
    module: nn.Module, source: str | Path, problems: Mapping[str, Sequence[str]]
) -> None:
    """Raise ValueError if there are keys with problems; it names the first few of each."""
    found = [
        f"{len(keys)} {what}: {', '.join(keys[:3])}" for what, keys in problems.items() if keys
    ]
    if found:
        raise ValueError("\n".join([f"{source} does not fit {type(module).__name__}", *found]))

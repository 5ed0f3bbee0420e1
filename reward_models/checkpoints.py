"""Reading weights that others published: safely, and with an account of every single key."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError  # only its name: nothing here reads pickles

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flowalign.paths import bundled

Renames = Sequence[tuple[str, str]]
"""Regular expressions and what replaces them, applied to every key in this order."""


def find_file(source: str, name: str | None = None) -> Path:
    """A local file, a file `name` in a local folder, or that of a hub repository.

    Raises:
        ValueError: naming `source`, where it is neither.
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
    try:
        return Path(hf_hub_download(source, name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{source} is no local path, and the hub does not give {name}") from error


def find_folder(source: str) -> Path:
    """A local folder, or a local copy of a hub repository. ValueError where there is neither."""
    path = Path(bundled(source))
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"{source}: no such folder")
    try:
        return Path(snapshot_download(source))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{source} is no local folder, and the hub does not give it") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, of its sharded index, or of a torch file without pickle.

    Raises:
        ValueError: for what is truncated, is no checkpoint, or holds anything but tensors.
    """
    try:
        if path.name.endswith(".index.json"):
            shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            return {k: v for shard in shards for k, v in read_tensors(path.parent / shard).items()}
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, KeyError, ValueError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    except UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors; it is not loaded") from error
    content = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} is not a mapping of names to tensors")
    return dict(content)


def renamed(tensors: Mapping[str, Tensor], renames: Renames) -> dict[str, Tensor]:
    """The same tensors under the names that a module gives them. Two may not become one."""
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
    absent: Sequence[str] = (),
) -> None:
    """Load weights so that every key is accounted for: nothing missing, unexpected or misshapen.

    `unused` and `absent` are regular expressions of keys that a checkpoint may carry without use,
    and of parameters that it does not bring.

    Raises:
        ValueError: naming the first few keys that do not fit.
    """
    wanted = module.state_dict()
    given = {k: v for k, v in tensors.items() if k in wanted or not _any(unused, k)}
    fits = {k: v for k, v in given.items() if k in wanted and v.shape == wanted[k].shape}
    problems = {
        "missing": [k for k in wanted if k not in given and not _any(absent, k)],
        "unexpected": [k for k in given if k not in wanted],
        "of another shape": [k for k in given if k in wanted and k not in fits],
        "not finite": [k for k, v in fits.items() if not v.isfinite().all()],
    }
    found = [
        f"{len(keys)} {what}: {', '.join(keys[:3])}" for what, keys in problems.items() if keys
    ]
    if found:
        raise ValueError("\n".join([f"{source} does not fit {type(module).__name__}", *found]))
    module.load_state_dict(dict(given), strict=False)


def _any(patterns: Sequence[str], key: str) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in patterns)

"""Reads tensors from safetensors files and compares them with those of a network."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn


def require_file(file: Path) -> Path:
    """Return the file if it exists, otherwise raise ValueError."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist: not a checkpoint of this kind of training")
    return file


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ValueError: The file is truncated or not in safetensors format.
    """
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def require_same_shapes(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path
) -> None:
    """Raise ValueError unless both mappings have the same names and shapes."""
    wrong = got.keys() ^ wanted.keys()
    wrong |= {k for k in got.keys() & wanted.keys() if got[k].shape != wanted[k].shape}
    if wrong:
        raise ValueError(
            f"{file} belongs to another model or adapter: "
            f"{len(wrong)} of {len(wanted)} tensors differ,\n"
            f"for example {sorted(wrong)[0]}"
        )


def require_finite(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise ValueError if a tensor of a file has NaN or infinite values."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{file} has values that are not finite, in {name}")


def dequantize(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that may be quantized."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    if state := vars(tensor).get("quant_state"):
        functional: Any = importlib.import_module("bitsandbytes.functional")
        return functional.dequantize_4bit(tensor.data, state)
    return tensor.dequantize()

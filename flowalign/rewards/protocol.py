"""Encodes media and scores between a reward server and its clients, without pickle or loss.

A request is a safetensors file: `media`, `reference.I.J` for reference image J of sample I,
`mask.I` for its mask, and in its metadata, under `request`, everything else as JSON. It is put
together here rather than by the library, which copies the pixels several times; reading is the
library's.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flowalign.types import MediaBatch, RewardOutput, RewardSpec

VERSION = 1
CONTENT_TYPE = "application/x-flowalign"
Pixels = Literal["float32", "8bit"]
Piece = bytes | memoryview


def pack_batch(batch: MediaBatch, pixels: Pixels, extra: Mapping[str, Any]) -> list[Piece]:
    """Encode a request in pieces; `8bit` rounds pixels like image files, for a quarter of the size.

    `extra` adds entries to the request's JSON.
    """
    tensors = {"media": _pack(batch.media, pixels)}
    for i, some in enumerate(batch.references):
        tensors |= {f"reference.{i}.{j}": _pack(image, pixels) for j, image in enumerate(some)}
    masks = {f"mask.{i}": mask for i, mask in enumerate(batch.masks) if mask is not None}
    tensors |= {name: _pack(mask, pixels) for name, mask in masks.items()}
    request = {
        "version": VERSION,
        "prompts": list(batch.prompts),
        "fps": list(batch.fps),
        "metadata": [dict(row) for row in batch.metadata],
        "groups": list(batch.groups),
        "references": [len(some) for some in batch.references],
        **({"masks": [mask is not None for mask in batch.masks]} if batch.masks else {}),
        **extra,
    }
    return _safetensors(tensors, {"request": json.dumps(request)})


def unpack_batch(message: bytes) -> tuple[MediaBatch, dict[str, Any]]:
    """Decode the batch of a request, and its JSON; raises ValueError if it is no such message."""
    tensors, request = open_message(message)
    return batch_of(tensors, request), request


def open_message(message: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the stored tensors and the JSON of a request, which fit each other.

    Raises:
        ValueError: It is no such message.
    """
    try:
        size = int.from_bytes(message[:8], "little")
        request = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["request"])
        tensors = load(message)
        if request["version"] != VERSION:
            raise ValueError(f"version {request['version']!r}; this side speaks {VERSION}")
        media = tensors["media"]
        check_columns(request, len(media) if media.ndim else 0)
        _check_tensors(tensors, request["references"], request.get("masks", []))
    except (SafetensorError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a message of flowalign: {type(error).__name__} {error}") from error
    return tensors, request


def _check_tensors(
    tensors: Mapping[str, Tensor], counts: Sequence[int], masked: Sequence[bool]
) -> None:
    """Raise ValueError unless these are media, `counts` references of each sample, and masks."""
    if sum(counts) + sum(masked) != len(tensors) - 1:
        declared = f"{sum(counts)}" + (f" and {sum(masked)} masks" if masked else "")
        raise ValueError(f"{len(tensors) - 1} reference images, but {declared} declared")
    wanted = {"media", *(f"reference.{i}.{j}" for i, n in enumerate(counts) for j in range(n))}
    wanted |= {f"mask.{i}" for i, given in enumerate(masked) if given}
    if wanted != set(tensors):
        raise ValueError(f"tensors {sorted(set(tensors) ^ wanted)[:5]} do not fit the request")
    for name, tensor in tensors.items():
        kind = name.partition(".")[0]
        ndim, axis, channels = {"media": (5, 2, 3), "mask": (3, 0, 1)}.get(kind, (3, 0, 3))
        if tensor.ndim != ndim or tensor.shape[axis] != channels:
            expected = "(n, frames, 3, h, w)" if kind == "media" else f"({channels}, h, w)"
            raise ValueError(f"{name} of shape {tuple(tensor.shape)}, expected {expected}")
        if tensor.dtype not in (torch.uint8, torch.float32):
            raise ValueError(f"{name} of {tensor.dtype}, expected float32 or uint8")


def batch_of(tensors: Mapping[str, Tensor], request: Mapping[str, Any]) -> MediaBatch:
    """Return the batch of an opened message, with pixels in [0, 1]."""
    references = [
        [_unpack(tensors[f"reference.{i}.{j}"]) for j in range(count)]
        for i, count in enumerate(request["references"])
    ]
    return MediaBatch(
        _unpack(tensors["media"]),
        request["prompts"],
        request["metadata"],
        request["fps"],
        references,
        request["groups"],
        [
            _unpack(tensors[f"mask.{i}"]) if given else None
            for i, given in enumerate(request.get("masks", []))
        ],
    )


def check_columns(request: Mapping[str, Any], count: int) -> None:
    """Raise ValueError unless each column of a request has an entry of its kind per sample."""
    if count < 1:
        raise ValueError("a request needs at least one sample")
    for name, (fits, kind) in _COLUMNS.items():
        column = request.get(name, [])
        if not isinstance(column, list) or not all(fits(entry) for entry in column):
            raise ValueError(f"{name} must be a list of {kind}, got {_short(column)}")
        if len(column) != count and (column or name == "prompts"):
            raise ValueError(f"{len(column)} {name} for {count} samples")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_COLUMNS: dict[str, tuple[Callable[[object], bool], str]] = {
    "prompts": (lambda entry: isinstance(entry, str), "texts"),
    "metadata": (lambda entry: isinstance(entry, dict), "JSON objects"),
    "fps": (_is_rate, "numbers above 0"),
    "groups": (_is_count, "whole numbers from 0"),
    "references": (_is_count, "whole numbers from 0"),
    "masks": (lambda entry: isinstance(entry, bool), "true or false"),
}


def _short(value: object) -> str:
    return f"{value!r:.60}"


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Piece]:
    """Encode a safetensors file in pieces that share the memory of the tensors."""
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces, start = [], 0
    for name, tensor in tensors.items():
        data = tensor.numpy().reshape(-1).view(np.uint8).data
        kind = "U8" if tensor.dtype == torch.uint8 else "F32"
        offsets = [start, start + data.nbytes]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        pieces.append(data)
        start += data.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little") + head, *pieces]


def output_to_json(output: RewardOutput) -> dict[str, Any]:
    """Encode scores as JSON; null stands for a score that could not be computed."""
    return {
        "version": VERSION,
        "values": _numbers(output.values),
        "uncertainty": None if output.uncertainty is None else _numbers(output.uncertainty),
        "reasons": {str(i): why for i, why in output.reasons.items()},
        "extras": [dict(extra) for extra in output.extras],
        **({"maps": _maps_to_json(output.maps)} if output.maps else {}),
    }


def output_from_json(content: Any, spec: RewardSpec, count: int) -> RewardOutput:
    """Decode the scores of `count` samples; raises ValueError if the answer is no such JSON."""
    try:
        values = _tensor(content["values"], spec)
        spread = content["uncertainty"]
        reasons = {int(i): str(why) for i, why in content["reasons"].items()}
        extras = content["extras"]
        uncertainty = None if spread is None else _tensor(spread, spec)
        places = _places(content["maps"], count) if content.get("maps") else None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer of a reward server: {error!r}") from error
    if len(values) != count or len(extras) not in (0, count):
        raise ValueError(f"the server answered {len(values)} rows for {count} samples")
    return RewardOutput.build(spec, values, reasons, uncertainty, extras, places)


def _maps_to_json(maps: Mapping[str, Tensor]) -> dict[str, Any]:
    """Encode the one map of a model as float32 in base64."""
    (places,) = maps.values()
    content = places.float().cpu().contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(places.shape), "float32": base64.b64encode(content).decode()}


def _places(content: Mapping[str, Any], count: int) -> Tensor:
    """Decode the maps of `count` samples; raises ValueError if they are no such maps."""
    shape = [int(size) for size in content["shape"]]
    numbers = np.frombuffer(base64.b64decode(content["float32"], validate=True), "<f4")
    if shape[0] != count or len(shape) not in (3, 4) or math.prod(shape) != len(numbers):
        raise ValueError(f"maps of shape {shape} with {len(numbers)} numbers for {count} samples")
    return torch.from_numpy(numbers.astype(np.float32)).view(shape)


def _pack(media: Tensor, pixels: Pixels) -> Tensor:
    media = media.detach().cpu()
    if pixels == "float32":
        return media.float().contiguous()
    packed = torch.empty(media.shape, dtype=torch.uint8)
    scratch, whole = torch.empty(media.shape[1:]), torch.empty(media.shape[1:], dtype=torch.int16)
    for sample, small in zip(media, packed, strict=True):  # one at a time stays in the cache
        torch.mul(sample, 255, out=scratch)
        whole.copy_(scratch.add_(0.5).clamp_(0, 255))  # from float to uint8 directly is slow
        small.copy_(whole)
    return packed


def _unpack(media: Tensor) -> Tensor:
    if media.dtype != torch.uint8:
        return media
    pixels = torch.empty(media.shape)
    for sample, small in zip(pixels, media, strict=True):
        torch.div(small, 255, out=sample)
    return pixels


def _numbers(values: Tensor) -> list[list[float | None]]:
    return [[x if math.isfinite(x) else None for x in row] for row in values.tolist()]


def _tensor(rows: list[list[float | None]], spec: RewardSpec) -> Tensor:
    numbers = [[math.nan if x is None else float(x) for x in row] for row in rows]
    if any(len(row) != len(spec.dims) for row in numbers):
        raise ValueError(f"the server's rows do not have {len(spec.dims)} dimensions")
    return torch.tensor(numbers).view(-1, len(spec.dims))

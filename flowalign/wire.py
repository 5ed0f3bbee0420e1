"""How media and scores travel between a reward server and its clients: no pickle, nothing lost.

A message is a JSON header and a safetensors body, so that a reader knows what follows before it
reads it:

    8 bytes   length of the header, little-endian
    header    JSON in UTF-8
    body      safetensors: `media`, and `reference.I.J` for reference image J of sample I
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flowalign.reward_types import MediaBatch, RewardOutput, RewardSpec

VERSION = 1
CONTENT_TYPE = "application/x-flowalign"
Pixels = Literal["float32", "8bit"]


def pack_batch(batch: MediaBatch, pixels: Pixels, extra: Mapping[str, Any]) -> bytes:
    """A request. `8bit` rounds pixels as any image file would, and is four times smaller."""
    tensors = {"media": _pack(batch.media, pixels)}
    for i, some in enumerate(batch.references):
        tensors |= {f"reference.{i}.{j}": _pack(image, pixels) for j, image in enumerate(some)}
    header = {
        "version": VERSION, "prompts": list(batch.prompts), "fps": list(batch.fps),
        "metadata": [dict(row) for row in batch.metadata], "groups": list(batch.groups),
        "references": [len(some) for some in batch.references], **extra,
    }  # fmt: skip
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + save(tensors)


def unpack_batch(message: bytes) -> tuple[MediaBatch, dict[str, Any]]:
    """The batch of a request, and its header. ValueError for what is no such message."""
    size = int.from_bytes(message[:8], "little")
    try:
        header = json.loads(message[8 : 8 + size])
        tensors = load(message[8 + size :])
        if header["version"] != VERSION:
            raise ValueError(f"version {header['version']}; this side speaks {VERSION}")
        media = _unpack(tensors["media"])
        references = [
            [_unpack(tensors[f"reference.{i}.{j}"]) for j in range(count)]
            for i, count in enumerate(header["references"])
        ]
        batch = MediaBatch(
            media, header["prompts"], header["metadata"], header["fps"], references,
            header["groups"],
        )  # fmt: skip
    except (SafetensorError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message of flowalign: {type(error).__name__} {error}") from error
    if media.ndim != 5 or media.shape[2] != 3:
        raise ValueError(f"media of shape {tuple(media.shape)}, expected (n, frames, 3, h, w)")
    for name in ("prompts", "metadata", "fps", "references", "groups"):
        if len(header[name]) not in ((len(media),) if name == "prompts" else (0, len(media))):
            raise ValueError(f"{len(header[name])} {name} for {len(media)} samples")
    return batch, header


def output_to_json(output: RewardOutput) -> dict[str, Any]:
    """Scores as JSON: null where one could not be computed."""
    return {
        "version": VERSION,
        "values": _numbers(output.values),
        "uncertainty": None if output.uncertainty is None else _numbers(output.uncertainty),
        "reasons": {str(i): why for i, why in output.reasons.items()},
        "extras": [dict(extra) for extra in output.extras],
    }


def output_from_json(content: Any, spec: RewardSpec, count: int) -> RewardOutput:
    """Scores of `count` samples. ValueError for an answer of another length or kind."""
    try:
        values = _tensor(content["values"], spec)
        spread = content["uncertainty"]
        reasons = {int(i): str(why) for i, why in content["reasons"].items()}
        extras = content["extras"]
        uncertainty = None if spread is None else _tensor(spread, spec)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer of a reward server: {error!r}") from error
    if len(values) != count or len(extras) not in (0, count):
        raise ValueError(f"the server answered {len(values)} rows for {count} samples")
    return RewardOutput.build(spec, values, reasons, uncertainty, extras)


def _pack(media: Tensor, pixels: Pixels) -> Tensor:
    media = media.detach().cpu()
    if pixels == "float32":
        return media.float().contiguous()
    packed = torch.empty(media.shape, dtype=torch.uint8)
    for sample, small in zip(media, packed, strict=True):  # one at a time stays in the cache
        small.copy_(sample.mul(255).add_(0.5).clamp_(0, 255))
    return packed


def _unpack(media: Tensor) -> Tensor:
    if media.dtype != torch.uint8:
        return media
    pixels = torch.empty(media.shape)
    for sample, small in zip(pixels, media, strict=True):
        sample.copy_(small).div_(255)
    return pixels


def _numbers(values: Tensor) -> list[list[float | None]]:
    return [[x if math.isfinite(x) else None for x in row] for row in values.tolist()]


def _tensor(rows: list[list[float | None]], spec: RewardSpec) -> Tensor:
    numbers = [[math.nan if x is None else float(x) for x in row] for row in rows]
    if any(len(row) != len(spec.dims) for row in numbers):
        raise ValueError(f"the server's rows do not have {len(spec.dims)} dimensions")
    return torch.tensor(numbers).view(-1, len(spec.dims))

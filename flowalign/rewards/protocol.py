"""Encode and decode messages between a reward server and its clients, without pickle.

A request is a safetensors file with the tensors `media`, `reference.I.J` (reference image J of
sample I) and `mask.I`. Its metadata entry `request` has everything else as JSON. A request may also
be plain JSON with lossless image files in base64. The answer is JSON.
"""

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flowalign.types import MediaBatch, RewardOutput, RewardSpec
from flowalign.utils.errors import explain_errors
from flowalign.utils.files import parse_json
from flowalign.utils.media.media import MediaProblem
from flowalign.utils.media.pixels import count_frames, explain_damage, to_rgb

Pixels = Literal["float32", "8bit"]
_ROUNDING = 1e-3
"""Tolerance of the range [0, 1], because lower precisions round."""

VERSION = 1
CONTENT_TYPE = "application/x-flowalign"
Pieces = list[bytes | memoryview]
"""Message in pieces that share the memory of the tensors."""

_FORMATS = ("PNG", "WEBP", "BMP")
_LONGEST_ID = 200


def pack_batch(batch: MediaBatch, pixels: Pixels, extra: Mapping[str, Any]) -> Pieces:
    """Encode a request; `8bit` rounds pixels like image files and takes a quarter of the size.

    `extra` adds entries to the JSON of the request.
    """
    tensors = {"media": batch.media} | {
        f"reference.{i}.{j}": image
        for i, images in enumerate(batch.references)
        for j, image in enumerate(images)
    }
    tensors |= {f"mask.{i}": mask for i, mask in enumerate(batch.masks) if mask is not None}
    request = {
        "version": VERSION,
        "prompts": list(batch.prompts),
        "fps": list(batch.fps),
        "metadata": [dict(row) for row in batch.metadata],
        "groups": list(batch.groups),
        "references": [len(images) for images in batch.references],
        "masks": [mask is not None for mask in batch.masks],
        **extra,
    }
    packed = {name: _pack_pixels(tensor, pixels) for name, tensor in tensors.items()}
    return _pack_safetensors(packed, {"request": json.dumps(request)})


def _pack_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Pieces:
    # safetensors.torch.save copies the pixels three times, 15 ms for 16 images of 256 x 256.
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces, start = [], 0
    for name, tensor in tensors.items():
        piece = tensor.numpy().reshape(-1).view(np.uint8).data
        offsets = [start, start := start + piece.nbytes]
        kind = "U8" if tensor.dtype == torch.uint8 else "F32"
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        pieces.append(piece)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little") + head, *pieces]


def read_request(
    body: bytes, content_type: str, reserve: Callable[[Sequence[Sequence[int]]], None]
) -> tuple[dict[str, Any], MediaBatch]:
    """Return the header of a request and its batch.

    `reserve` is called with the shapes (..., channels, height, width) of all images before their
    pixels are decoded. It raises an error if the request is too large.

    Raises:
        ValueError: The request is malformed.
        PIL.Image.DecompressionBombError: An image exceeds Pillow's size limit.
    """
    if content_type.startswith(CONTENT_TYPE):
        kinds = SafetensorError, KeyError, TypeError, UnicodeDecodeError
        with explain_errors("not a message of flowalign", *kinds):
            header, tensors = _open_safetensors(body)
        reserve([tensor.shape for tensor in tensors.values()])
        return header, _decode_tensors(tensors, header)
    header, images = _open_json(body)
    reserve([(3, image.height, image.width) for image in images])
    return header, _decode_images(images, header)


def _open_safetensors(body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # safetensors can read metadata only from files, so the header is parsed here.
    size = int.from_bytes(body[:8], "little")
    header = parse_json(parse_json(body[8 : 8 + size])["__metadata__"]["request"])
    tensors = load(body)
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']!r}; this side speaks {VERSION}")
    media = tensors["media"]
    _check_header(header, _BINARY_KEYS, len(media) if media.ndim else 0)
    # Compare the counts with the tensors before making names: a client may send a huge count.
    counts = sum(header["references"]), sum(header["masks"])
    if sum(counts) != len(tensors) - 1:
        raise ValueError(
            f"{len(tensors) - 1} reference images, but {counts[0]} and {counts[1]} masks declared"
        )
    names = [f"reference.{i}.{j}" for i, n in enumerate(header["references"]) for j in range(n)]
    names += [f"mask.{i}" for i, has_mask in enumerate(header["masks"]) if has_mask]
    for name in ("media", *names):
        _check_shape(name, tensors[name])
    return header, tensors


def _decode_tensors(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> MediaBatch:
    for name, tensor in tensors.items():
        _check_range(name, tensor)
    pixels = {name: _unpack_pixels(tensor) for name, tensor in tensors.items()}
    counts = header["references"]
    return MediaBatch(
        pixels["media"],
        header["prompts"],
        header["metadata"],
        header["fps"],
        [[pixels[f"reference.{i}.{j}"] for j in range(n)] for i, n in enumerate(counts)],
        header["groups"],
        [pixels.get(f"mask.{i}") for i in range(len(header["masks"]))],
    )


def _pack_pixels(media: Tensor, pixels: Pixels) -> Tensor:
    """Return media as float32, or rounded to 8 bits, on the CPU."""
    media = media.detach().float().cpu()
    if pixels == "8bit":
        media = media.mul(255).add_(0.5).clamp_(0, 255).to(torch.uint8)
    return media.contiguous()


def _unpack_pixels(media: Tensor) -> Tensor:
    """Return packed media in [0, 1]."""
    return media.float() / 255 if media.dtype == torch.uint8 else media


def _check_shape(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor has the shape and dtype that belong to its name."""
    kind = name.partition(".")[0]
    channels = 1 if kind == "mask" else 3
    expected = (5, "(n, frames, 3, h, w)") if kind == "media" else (3, f"({channels}, h, w)")
    if tensor.ndim != expected[0] or tensor.shape[-3] != channels:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)}, expected {expected[1]}")
    if tensor.dtype not in (torch.uint8, torch.float32):
        raise ValueError(f"{name} of {tensor.dtype}, expected float32 or uint8")


def _check_range(name: str, tensor: Tensor) -> None:
    """Raise ValueError for finite values outside [0, 1]; non-finite values are ignored."""
    if tensor.dtype == torch.uint8:
        return
    lowest, highest = (x.item() for x in tensor.nan_to_num(0.5, 0.5, 0.5).aminmax())
    if lowest < -_ROUNDING or highest > 1 + _ROUNDING:
        expected = "expected float32 in [0, 1] or uint8"
        raise ValueError(f"{name} has values in [{lowest:g}, {highest:g}], {expected}")


def _open_json(body: bytes) -> tuple[dict[str, Any], list[Image.Image]]:
    with explain_errors("not JSON"):
        header = parse_json(body)
    if not isinstance(header, dict) or "images" not in header:
        raise ValueError("need a JSON object with prompts and images")
    texts = header["images"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"images must be a list of base64 texts, got {texts!r:.60}")
    header.setdefault("prompts", [""] * len(texts))
    _check_header(header, _JSON_KEYS, len(texts))
    with explain_errors("an image is not base64"):
        files = [base64.b64decode(text, validate=True) for text in header.pop("images")]
    return header, [_open_image(file) for file in files]


def _open_image(file: bytes) -> Image.Image:
    """Read the header of an image file, which declares its size, without decoding pixels."""
    try:
        with explain_damage("an image"):
            image = Image.open(io.BytesIO(file), formats=(*_FORMATS, "JPEG"))
            frames = count_frames(image)
    except MediaProblem as problem:
        if isinstance(problem.__cause__, Image.DecompressionBombError):
            raise problem.__cause__ from None
        raise
    if image.format not in _FORMATS:
        raise ValueError(f"an image is {image.format}; send PNG or lossless WebP")
    if frames > 1:
        raise ValueError(f"an image is an animation of {frames} frames; send one frame")
    return image


def _decode_images(images: Sequence[Image.Image], header: Mapping[str, Any]) -> MediaBatch:
    pixels = [to_rgb(image, "an image") for image in images]
    if len({image.shape for image in pixels}) != 1:
        raise ValueError("images of one request have one size")
    media = _unpack_pixels(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))
    return MediaBatch(media[:, None], header["prompts"], header["metadata"])


def _check_header(header: dict[str, Any], known: set[str], count: int) -> None:
    """Raise ValueError unless a request is well-formed; absent columns become empty lists."""
    if unknown := sorted(header.keys() - known):
        raise ValueError(f"unknown keys {unknown[:5]!r:.200}; there are {', '.join(sorted(known))}")
    for name, (fits, words) in _OPTIONS.items():
        if (value := header.get(name)) is not None and not fits(value):
            raise ValueError(f"{name} must be {words}, got {value!r:.60}")
    if count < 1:
        raise ValueError("a request needs at least one sample")
    for name, (fits, words) in _COLUMNS.items():
        column = header.setdefault(name, [])
        if not isinstance(column, list) or not all(map(fits, column)):
            raise ValueError(f"{name} must be a list of {words}, got {column!r:.60}")
        if len(column) != count and (column or name == "prompts"):
            raise ValueError(f"{len(column)} {name} for {count} samples")


# isinstance(True, int) is true, so types of numbers are compared exactly.
def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_ID


_Kind = tuple[Callable[[object], bool], str]
"""Test of a value, and the words for values that pass it."""
_OPTIONS: dict[str, _Kind] = {
    "request_id": (_is_name, f"a text of up to {_LONGEST_ID} letters"),
    "model": (_is_name, f"a text of up to {_LONGEST_ID} letters"),
    "deadline_s": (_is_positive, "a number of seconds above 0"),
}
_COLUMNS: dict[str, _Kind] = {
    "prompts": (lambda entry: isinstance(entry, str), "texts"),
    "metadata": (lambda entry: isinstance(entry, dict), "JSON objects"),
    "fps": (_is_positive, "numbers above 0"),
    "groups": (_is_count, "whole numbers from 0"),
    "references": (_is_count, "whole numbers from 0"),
    "masks": (lambda entry: isinstance(entry, bool), "true or false"),
}
_BINARY_KEYS = {"version", *_COLUMNS, *_OPTIONS}
_JSON_KEYS = {"prompts", "images", "metadata", *_OPTIONS}


def spec_to_json(spec: RewardSpec) -> dict[str, Any]:
    """Encode a spec with its fingerprint; null is an infinite bound of the scale."""
    bounds = [bound if math.isfinite(bound) else None for bound in spec.scale]
    return asdict(spec) | {"fingerprint": spec.fingerprint(), "scale": bounds}


def output_to_json(output: RewardOutput) -> dict[str, Any]:
    """Encode scores as JSON; null is a score that could not be computed."""
    return {
        "version": VERSION,
        "values": _replace_nan(output.values),
        "uncertainty": None if output.uncertainty is None else _replace_nan(output.uncertainty),
        "reasons": {str(i): why for i, why in output.reasons.items()},
        "extras": [dict(extra) for extra in output.extras],
        # A model has at most one map. Base64 keeps NaN, which JSON lacks.
        "maps": next(map(_map_to_json, output.maps.values()), None),
    }


def output_from_json(content: Any, spec: RewardSpec, count: int) -> RewardOutput:
    """Decode the scores of `count` samples; raise ValueError if the answer is malformed."""
    shape = count, len(spec.dims)
    kinds = KeyError, IndexError, TypeError, AttributeError
    with explain_errors("not an answer of a reward server", *kinds):
        values, spread = _restore_nan(content["values"], shape), content["uncertainty"]
        reasons = {int(i): str(why) for i, why in content["reasons"].items()}
        extras, maps = content["extras"], content["maps"]
        uncertainty = None if spread is None else _restore_nan(spread, shape)
        places = None if maps is None else _map_from_json(maps, count)
        # A reason of a sample that has some scores is that of the missing ones.
        failed = {i: why for i, why in reasons.items() if not values[i].isnan().any()}
    if len(extras) not in (0, count):
        raise ValueError(f"the server answered {len(extras)} extras for {count} samples")
    output = RewardOutput.build(spec, values, failed, uncertainty, extras, places)
    return replace(output, reasons={**output.reasons, **reasons})


def _replace_nan(values: Tensor) -> list[list[float | None]]:
    return [[x if math.isfinite(x) else None for x in row] for row in values.tolist()]


def _restore_nan(rows: list[list[float | None]], shape: tuple[int, int]) -> Tensor:
    values = torch.tensor([[math.nan if x is None else float(x) for x in row] for row in rows])
    if values.shape != shape:
        expected = f"expected {shape[0]} samples with {shape[1]} dimensions"
        raise ValueError(f"the server answered shape {tuple(values.shape)}, {expected}")
    return values


def _map_to_json(places: Tensor) -> dict[str, Any]:
    content = places.float().cpu().contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(places.shape), "float32": base64.b64encode(content).decode()}


def _map_from_json(content: Mapping[str, Any], count: int) -> Tensor:
    shape = [int(size) for size in content["shape"]]
    numbers = np.frombuffer(base64.b64decode(content["float32"], validate=True), "<f4")
    if shape[0] != count or len(shape) not in (3, 4) or math.prod(shape) != len(numbers):
        raise ValueError(f"maps of shape {shape} with {len(numbers)} numbers for {count} samples")
    return torch.from_numpy(numbers.astype(np.float32)).view(shape)

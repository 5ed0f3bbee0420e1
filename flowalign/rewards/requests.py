"""Reads requests of a reward server; what they declare is checked before pixels are decoded."""

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowalign.rewards.limits import BYTES_PER_PIXEL, Limits, Refused
from flowalign.rewards.protocol import CONTENT_TYPE, batch_of, check_columns, open_message
from flowalign.types import MediaBatch

_ADDRESS = ("request_id", "model", "deadline_s")
"""Keys of a request that say who asks whom, and until when."""
_JSON_KEYS = {"prompts", "images", "metadata", *_ADDRESS}
_COLUMNS = ("prompts", "fps", "metadata", "groups", "references", "masks")
_BINARY_KEYS = {"version", *_COLUMNS, *_ADDRESS}
_FORMATS = ("PNG", "WEBP", "BMP")
_LONGEST_ID = 200
_BROKEN = (
    *(OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError, TypeError),
    *(AttributeError, RuntimeError),
)
"""Errors that Pillow raises for broken files, by their format."""


@dataclass(frozen=True)
class Request:
    """Holds a request that was understood, and knows how to decode its pixels."""

    request_id: str | None
    """Name under which its answer is remembered."""
    model: str | None
    """Model that is asked; None for the only one."""
    deadline: float
    """Seconds in which an answer is wanted."""
    size: int
    """Number of bytes that decoding takes."""
    decode: Callable[[], MediaBatch]
    """Returns the batch; raises ValueError for a broken picture."""


def read_request(body: bytes, content_type: str, limits: Limits) -> Request:
    """Read all but the pixels of a request.

    Raises:
        ValueError: It is malformed.
        Refused: It has more pixels than the limits allow.
    """
    if content_type.startswith(CONTENT_TYPE):
        tensors, header = open_message(body)
        _check_header(header, _BINARY_KEYS)
        size = sum(t.nbytes for t in tensors.values())  # the library's copy of the message
        shapes = [tensors["media"].shape] + [t.shape for k, t in tensors.items() if k != "media"]
        decode = partial(batch_of, tensors, header)
    else:
        header = _json_object(body)
        _check_header(header, _JSON_KEYS)
        files = _files(header)
        pictures = [_opened(file) for file in files]
        header.setdefault("prompts", [""] * len(pictures))
        check_columns(header, len(pictures))
        size, shapes = len(body), [(3, p.height, p.width) for p in pictures]
        decode = partial(_decoded, pictures, header)
    pixels = _check_pixels(shapes, limits)
    return Request(
        header.get("request_id"),
        header.get("model"),
        min(header.get("deadline_s") or limits.deadline, limits.deadline),
        size + pixels * BYTES_PER_PIXEL,
        decode,
    )


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        header = json.loads(body)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(header, dict) or "images" not in header:
        raise ValueError("need a JSON object with prompts and images")
    return header


def _check_header(header: Mapping[str, Any], known: set[str]) -> None:
    """Refuse keys that nobody reads, and a wrong id, model or deadline."""
    if unknown := sorted(header.keys() - known):
        raise ValueError(f"unknown keys {unknown[:5]!r:.200}; there are {', '.join(sorted(known))}")
    for name in ("request_id", "model"):
        value = header.get(name)
        if value is not None and not (isinstance(value, str) and len(value) <= _LONGEST_ID):
            raise ValueError(
                f"{name} must be a text of up to {_LONGEST_ID} letters, got {value!r:.60}"
            )
    seconds = header.get("deadline_s")
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds < math.inf):
        raise ValueError(f"deadline_s must be a number of seconds above 0, got {seconds!r:.60}")


def _check_pixels(shapes: Sequence[Sequence[int]], limits: Limits) -> int:
    """Return the number of pixels of media (n, frames, 3, h, w) and pictures (3, h, w)."""
    total = 0
    for *several, _, height, width in shapes:
        if height * width > limits.max_picture_mp * 1e6:
            raise Refused(
                413, f"{width} x {height} pixels; a picture may have {limits.max_picture_mp:g} MP"
            )
        if 0 in (height, width):
            raise ValueError(f"{width} x {height} pixels are no picture")
        total += math.prod(several) * height * width
    if total > limits.max_request_mp * 1e6:
        raise Refused(
            413, f"{total / 1e6:.1f} MP in all; a request may have {limits.max_request_mp:g}"
        )
    return total


def _files(header: dict[str, Any]) -> list[bytes]:
    images = header.pop("images")  # they are large, and the rest of the header lives on
    if not isinstance(images, list) or not all(isinstance(text, str) for text in images):
        raise ValueError(f"images must be a list of base64 texts, got {images!r:.60}")
    try:
        return [base64.b64decode(text, validate=True) for text in images]
    except ValueError as error:
        raise ValueError(f"an image is not base64: {error}") from error


def _opened(file: bytes) -> Image.Image:
    """Read the header of a picture, which declares its size."""
    try:
        picture = Image.open(io.BytesIO(file), formats=(*_FORMATS, "JPEG"))
    except Image.DecompressionBombError as error:
        raise Refused(413, str(error)) from error
    except _BROKEN as error:
        raise ValueError(f"an image cannot be read: {error}") from error
    if picture.format not in _FORMATS:
        raise ValueError(f"an image is {picture.format}; send PNG or lossless WebP")
    return picture


def _decoded(pictures: Sequence[Image.Image], header: Mapping[str, Any]) -> MediaBatch:
    if len({picture.size for picture in pictures}) != 1:
        raise ValueError("images of one request have one size")
    width, height = pictures[0].size
    media = torch.empty(len(pictures), 1, 3, height, width)
    for picture, pixels in zip(pictures, media, strict=True):
        try:
            eight = torch.from_numpy(np.array(picture.convert("RGB")))
        except _BROKEN as error:
            raise ValueError(f"an image cannot be read: {error}") from error
        torch.div(eight.permute(2, 0, 1), 255, out=pixels[0])
    return MediaBatch(media, header["prompts"], header.get("metadata", []))

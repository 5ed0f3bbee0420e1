"""Prepares images and clips for autoencoders, and identifies encoders by a digest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from flowalign.functional.resizing import resize_to_cover
from flowalign.types import InputSpec, Reference, Request
from pipelines.parts.tensors import dequantize

SAMPLED = 65536
"""Maximum number of values per tensor that a digest reads."""


def crop_images(
    media: Float[Tensor, "n F 3 h w"], height: int, width: int, path: str
) -> Float[Tensor, "n 3 height width"]:
    """Return one-frame samples as images in [-1, 1], resized and cropped for the model at `path`.

    Raises:
        ValueError: The samples have several frames.
    """
    if media.shape[1] != 1:
        raise ValueError(f"samples have {media.shape[1]} frames; {path} encodes images, of 1 frame")
    return 2 * resize_to_cover(media[:, 0], height, width) - 1


def crop_clips(
    media: Float[Tensor, "n F 3 h w"], num_frames: int, height: int, width: int, path: str
) -> Float[Tensor, "n 3 num_frames height width"]:
    """Return the first frames of clips in [-1, 1], resized and cropped for the model at `path`.

    Raises:
        ValueError: The clips have fewer than `num_frames` frames.
    """
    if media.shape[1] < num_frames:
        raise ValueError(
            f"a clip of {media.shape[1]} frames is too short: {path} encodes {num_frames} "
            "(policy.video.num_frames); remove it or reduce the number"
        )
    frames = resize_to_cover(media[:, :num_frames].flatten(0, 1), height, width)
    return 2 * frames.unflatten(0, (-1, num_frames)).transpose(1, 2) - 1


def pad_text(text: Tensor, mask: Tensor | None, length: int) -> dict[str, Tensor]:
    """Return text tokens padded to `length`, and the mask of tokens that are not padding.

    A `mask` of None means that `text` has no padding.
    """
    missing = length - text.shape[1]
    mask = text.new_ones(text.shape[:2]) if mask is None else mask
    return {"text": pad(text, (0, 0, 0, missing)), "mask": pad(mask.bool(), (0, missing))}


def pad_texts(texts: Sequence[Tensor], longest: int) -> dict[str, Tensor]:
    """Return texts of different lengths, padded to `longest` and stacked, and their lengths."""
    lengths = torch.tensor([len(text) for text in texts], device=texts[0].device)
    rows = [pad(text, (0, 0, 0, longest - len(text))) for text in texts]
    return {"text": torch.stack(rows), "length": lengths}


def digest(module: nn.Module, config: Mapping[str, Any], *settings: object) -> str:
    """Return 16 hexadecimal digits that identify an encoder with these settings.

    The digest covers the name, shape, dtype and equally spaced values of each tensor, and the
    configuration without versions and paths. Encoders that encode differently get different
    digests.
    """
    found = hashlib.sha256(repr((type(module).__name__, *settings)).encode())
    kept = {k: v for k, v in config.items() if k[0] != "_" and k != "transformers_version"}
    found.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        found.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        values = dequantize(tensor).flatten()[:: tensor.numel() // SAMPLED + 1].cpu()
        found.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def probe_request(prompt: str, input_spec: InputSpec, height: int, width: int) -> Request:
    """Return a request of this prompt with the minimum number of images that a policy takes.

    Each image is the same colour ramp of the given size. A mask is white on its right half.
    """
    columns = torch.linspace(0, 1, width).expand(1, height, width)
    ramp = torch.stack([columns, columns.flip(2), columns / 2], 1)
    picture = Reference("ramp", f"ramp of {height} x {width}", lambda: ramp)
    half = (columns > 0.5).float()[:, None].expand(1, 3, height, width)
    mask = Reference("half", f"half of {height} x {width}", lambda: half)
    return Request(prompt, (picture,) * input_spec.references[0], mask if input_spec.mask else None)


def mirror_references(request: Request) -> Request:
    """Return a request with its images flipped left to right."""
    turned = [
        Reference(
            f"{one.name} mirrored", f"{one.digest} mirrored", lambda one=one: one.read().flip(-1)
        )
        for one in request.references
    ]
    return replace(request, references=tuple(turned))

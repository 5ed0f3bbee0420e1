"""Prepares images, clips and references for models, decodes clips in pieces, names encoders."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from flowalign.functional.resizing import hole_within, resize_to_cover
from flowalign.types import InputSpec, Policy, Reference, Request
from flowalign.utils.imports import LazyModule
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


Decode = Callable[[Float[Tensor, "n C f h w"]], Float[Tensor, "n c g H W"]]
"""Maps f latent frames to 1 + (f - 1) * unit frames. The first latent frame decodes to one frame.
"""


def decode_windows(
    decode: Decode, z: Float[Tensor, "n C F h w"], size: int, unit: int
) -> Iterator[Float[Tensor, "n c f H W"]]:
    """Yield the frames of `decode(z)` in order, in pieces, from windows of size + 1 latent frames.

    Windows overlap by a quarter of their size, and by at least one latent frame if size > 1. Within
    the overlap a window fades linearly into the next one. The result differs from decoding at once
    because a window does not depend on its neighbours. Latents that fit one window are decoded at
    once.
    """
    overlap = max(size // 4, 1) if size > 1 else 0
    step, held = size - overlap, None
    for start in range(0, max(1, z.shape[2] - 1 - overlap), step):
        frames = decode(z[:, :, start : start + size + 1])
        if held is not None:
            frames = _fade(held, frames[:, :, 1:])  # its first frame was already yielded
        given = frames.shape[2] - overlap * unit
        if start + size + 1 >= z.shape[2]:
            given = frames.shape[2]
        yield frames[:, :, :given]
        held = frames[:, :, given:]


def _fade(
    before: Float[Tensor, "n c e H W"], after: Float[Tensor, "n c f H W"]
) -> Float[Tensor, "n c f H W"]:
    """Return `after` with its first e frames cross-faded from `before`."""
    e = before.shape[2]
    share = torch.arange(e, device=after.device, dtype=torch.float32).view(-1, 1, 1) / max(e, 1)
    mixed = (1 - share) * before + share * after[:, :, :e]
    return torch.cat([mixed, after[:, :, e:]], dim=2)


_wan = LazyModule("diffusers.models.autoencoders.autoencoder_kl_wan")


def stream_frames(vae: Any, z: Tensor, together: int) -> Iterator[Tensor]:
    """Yield the frames of Wan's autoencoder in order, equal to those of decoding at once.

    The first piece decodes the first latent frame, every other piece decodes `together` latent
    frames.
    """
    z = vae.post_quant_conv(z)
    states = [None] * sum(isinstance(m, _wan.WanCausalConv3d) for m in vae.decoder.modules())
    chunks = [z[:, :, :1], *z[:, :, 1:].split(together, 2)]
    for k, chunk in enumerate(chunks):
        if chunk.shape[2]:
            frames = vae.decoder(chunk, feat_cache=states, feat_idx=[0], first_chunk=k == 0)
            yield _wan.unpatchify(frames, vae.config.patch_size or 1).clamp(-1, 1)


def check_references(policy: Policy, requests: Sequence[Request]) -> None:
    """Check that requests have the reference images and the mask that a policy takes.

    Raises:
        ValueError: A request has other references or another mask.
    """
    for request in requests:
        if misfit := policy.input_spec.misfit(request):
            raise ValueError(f"{request.prompt!r}: {type(policy).__name__} {misfit}")


def read_hole(
    mask: Reference, picture: Float[Tensor, "1 3 h w"], height: int, width: int
) -> Bool[Tensor, "1 1 height width"]:
    """Return the mask of pixels to repaint within the centre crop of (height, width).

    Raises:
        ValueError: The mask and the image differ in size, or the mask is black within the crop.
    """
    pixels = mask.read()
    if pixels.shape != picture.shape:
        sizes = [f"{one.shape[-1]}x{one.shape[-2]}" for one in (pixels, picture)]
        raise ValueError(f"mask {mask.name} is {sizes[0]}, but its image is {sizes[1]}")
    hole = hole_within(pixels, height, width)
    if not hole.any():
        raise ValueError(
            f"mask {mask.name} is black within its {width}x{height} crop: white marks the pixels "
            "to paint"
        )
    return hole


def crop_first_frames(
    requests: Sequence[Request], proportion: float
) -> tuple[list[Image.Image], list[int]]:
    """Return the distinct first frames of requests, cropped, and each request's index into them."""
    given = [request.references[0] for request in requests]
    different = list(dict.fromkeys(given))
    return [crop_reference(one, proportion) for one in different], [
        different.index(one) for one in given
    ]


def to_image(pixels: Float[Tensor, "1 3 h w"]) -> Image.Image:
    """Return an 8-bit PIL image."""
    return Image.fromarray((255 * pixels[0]).round().byte().permute(1, 2, 0).cpu().numpy())


def crop_reference(reference: Reference, proportion: float) -> Image.Image:
    """Return the largest centre crop of an image with a width of `proportion` times its height."""
    picture = to_image(reference.read()[:1])
    width = min(picture.width, max(round(picture.height * proportion), 1))
    height = min(picture.height, max(round(picture.width / proportion), 1))
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))

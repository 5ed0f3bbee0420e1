"""Encodes images for chat servers."""

import base64
import io
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowalign.types import MediaBatch
from reward_models.backbones.frames import evenly
from reward_models.backbones.pixels import CLIP_MEAN, resize
from reward_models.backbones.rule import to_uint8


def encode_image(picture: Float[Tensor, "3 h w"]) -> str:
    """Encode an image in [0, 1] as a PNG in a data URL: lossless after rounding to 8 bits.

    JPEG of quality 75 would change a pixel by 3 to 4 levels on average, which affects a judge of
    artefacts.
    """
    bits = to_uint8(picture[None])[0]
    return _png(bits.tobytes(), bits.shape[1], bits.shape[0])


def encode_images(
    pictures: Sequence[Float[Tensor, "3 h w"]] | Float[Tensor, "n 3 h w"],
) -> list[str]:
    """Encode every image, in order."""
    return [encode_image(picture) for picture in pictures]


def encode_frames(
    sample: MediaBatch, most: int = 1, choose: Callable[[int, int], list[int]] = evenly
) -> list[str]:
    """Encode at most `most` frames of a batch of one; by default evenly spaced frames."""
    video = sample.media[0].detach()
    return encode_images(video[choose(len(video), min(most, len(video)))])


def encode_source(sample: MediaBatch) -> list[str]:
    """Encode the first reference of a batch of one that passed the screen."""
    return [encode_image(sample.references[0][0])]


def encode_references(sample: MediaBatch) -> list[str]:
    """Encode all references of a batch of one, followed by its mask if it has one."""
    pictures = list(sample.references[0]) if sample.references else []
    masks = [mask.expand(3, -1, -1) for mask in sample.masks if mask is not None]
    return [encode_image(picture) for picture in (*pictures, *masks)]


def resize_to_square(frames: Float[Tensor, "n 3 h w"], size: int) -> Float[Tensor, "n 3 size size"]:
    """Resize to a square, ignoring the aspect ratio."""
    return resize(frames, size, size, quantised=True)


def resize_shortest_side(frames: Float[Tensor, "n 3 h w"], size: int) -> Float[Tensor, "n 3 H W"]:
    """Resize to a shortest side of `size`, without cropping."""
    h, w = frames.shape[-2:]
    scale = size / min(h, w)
    return resize(frames, round(h * scale), round(w * scale), quantised=True)


@lru_cache(maxsize=32)  # each image of a group occurs in many pairs
def _png(bits: bytes, width: int, height: int) -> str:
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), bits).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def pad_to_square(frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 s s"]:
    """Pad to a square around the centre with CLIP's mean colour."""
    h, w = frames.shape[-2:]
    size = max(h, w)
    levels = [int(255 * mean) / 255 for mean in CLIP_MEAN]
    colour = torch.tensor(levels).to(frames)[None, :, None, None]
    square = colour.repeat(len(frames), 1, size, size)
    top, left = (size - h) // 2, (size - w) // 2
    square[..., top : top + h, left : left + w] = frames
    return square

"""Write many images or clips into one file."""

from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from flowalign.data.media.encode import CLIPS, write_clip
from flowalign.data.media.thumbnails import spread_frames, to_bytes
from flowalign.utils.files import GRID_PADDING, atomic_write

PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp")
"""File name extensions that `write_picture` supports."""
_KINDS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_OPTIONS = {"PNG": {}, "JPEG": {"quality": 95}, "WEBP": {"lossless": True}}
STRIP = 6
"""Largest number of frames in a film strip."""


def write_grid(
    path: Path, media: Float[Tensor, "n F 3 H W"], columns: int, fps: float | None
) -> str:
    """Write images, or clips if `fps` is set, in rows of `columns`; return a description.

    In a .png or .jpg file, each clip is a row of frames (a film strip). In other formats the clips
    play next to each other. The file is written atomically.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    num, num_frames = media.shape[:2]
    if fps and path.suffix.lower() in CLIPS:
        write_clip(
            path, torch.stack([arrange_grid(frames, columns) for frames in media.unbind(1)]), fps
        )
        return f"{num} clips, {columns} per row"
    if fps:
        shown = spread_frames(num_frames, STRIP)
        write_picture(path, arrange_grid(media[:, shown].flatten(0, 1), len(shown)))
        return f"{num} clips, a row of {len(shown)} of {num_frames} frames each"
    write_picture(path, arrange_grid(media[:, 0], columns))
    return f"{num} images, {columns} per row"


def arrange_grid(pictures: Float[Tensor, "n 3 H W"], columns: int) -> Float[Tensor, "3 h w"]:
    """Arrange images in rows of `columns`, with `GRID_PADDING` black pixels around each."""
    from torchvision.utils import make_grid

    if len(pictures) == 1:  # make_grid adds no padding to a single image
        return pad(pictures[0], [GRID_PADDING] * 4)
    return make_grid(pictures, nrow=columns, padding=GRID_PADDING)


def fit_into(
    picture: Float[Tensor, "3 _ _"], height: int, width: int
) -> Float[Tensor, "3 height width"]:
    """Return an image resized to fit into `height` x `width`, with black borders."""
    h, w = picture.shape[1:]
    scale = min(height / h, width / w)
    size = max(1, round(h * scale)), max(1, round(w * scale))
    if size != (h, w):
        resized = interpolate(picture[None], size, mode="bilinear", antialias=True)
        picture = resized[0]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return pad(picture, [left, width - size[1] - left, top, height - size[0] - top])


def write_picture(path: Path, picture: Float[Tensor, "3 h w"], alone: bool = False) -> None:
    """Write RGB in [0, 1] in the format of the file name extension; lossless except for JPEG.

    The file is written atomically; for `alone` see `atomic_write`.
    """
    kind = _KINDS[path.suffix.lower()]
    image = Image.fromarray(to_bytes(picture).permute(1, 2, 0).numpy())
    with atomic_write(path, alone) as partial:
        image.save(partial, format=kind, **_OPTIONS[kind])

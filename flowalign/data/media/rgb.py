"""Convert images to RGB in 8 bits: rotated by their EXIF data, without transparency."""

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from flowalign.data.media.frame_sampling import MediaProblem


def to_rgb(image: Image.Image, name: str, background: str = "white") -> UInt8[np.ndarray, "h w 3"]:
    """Return the pixels of an image as viewers show it, on `background`.

    Raises:
        MediaProblem: The pixel values have no known range.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        values = np.asarray(upright)
        alpha = np.where(values == upright.info.get("transparency"), 0, 255)
        grey = (values.astype(np.float32) / 257).round()
        upright = Image.fromarray(np.stack([grey, alpha], -1).astype(np.uint8))
    elif upright.mode in ("I", "F"):
        raise MediaProblem(f"unreadable image: {name} has pixel values of unknown range")
    return np.array(flatten(upright, background))


def flatten(image: Image.Image, background: str = "white") -> Image.Image:
    """Return an image in RGB, composited on `background` if it has transparency."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    behind = Image.new("RGBA", image.size, background)
    return Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")

"""Draw small images on a terminal with colours, two pixels per character."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F

_MOST = 4
"""Largest number of images in a row."""
_WIDEST = 32
"""Largest width of an image, in characters."""
_COLOURS = ("truecolor", "256", "windows")


def show_pictures(
    clips: Float[Tensor, "n frames 3 height width"],
    show: Callable[[Text], None],
    console: Console | None = None,
) -> None:
    """Show the first frames of the first images or videos; nothing without a colour terminal."""
    console = console or Console(stderr=True)
    if console.is_terminal and console.color_system in _COLOURS and len(clips):
        show(sketch(clips[:_MOST, 0], console.width))


def sketch(pictures: Float[Tensor, "n 3 height width"], columns: int) -> Text:
    """Return images, with values from 0 to 1, side by side.

    An upper half block shows two pixels: the upper one as text colour, the lower one as background.
    """
    height, width = pictures.shape[2:]
    across = max(1, min(_WIDEST, width, (columns + 1) // len(pictures) - 1))
    down = 2 * max(1, round(height * across / width / 2))
    small = F.interpolate(pictures.float(), (down, across), mode="area")
    colours = (small.clamp(0, 1) * 255).round().to(torch.uint8).permute(2, 0, 3, 1).tolist()
    text = Text()
    for upper, lower in zip(colours[::2], colours[1::2], strict=True):
        for i, (above, below) in enumerate(zip(upper, lower, strict=True)):
            text.append(" " * (i > 0))
            for top, bottom in zip(above, below, strict=True):
                style = Style(color=Color.from_rgb(*top), bgcolor=Color.from_rgb(*bottom))
                text.append("▀", style)
        text.append("\n")
    text.right_crop(1)
    return text

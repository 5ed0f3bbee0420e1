"""Draw on a page in inches, y growing downwards, and map numbers to colours around 0."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.utils.files import atomic_write

Cells = Sequence[Sequence[float | None]]
MARGIN = 0.2
INK, SOFT = "#1c1c1c", "#5a5a5a"
_BAD, _NONE, _GOOD, _EMPTY, _STAR = "#d55e00", "#fbfbfb", "#0072b2", "#dddddd", "#ffd400"
_DPI = 144


class Canvas:
    """Represents a page that grows as it is drawn on; `y` is where the next part begins."""

    def __init__(self):
        from matplotlib.figure import Figure

        self.figure = Figure(dpi=_DPI)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.width, self.y = 6.6, MARGIN

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Draw text centred on (x, y), unless `style` says otherwise."""
        self.axes.text(x, y, text, **{"va": "center", "ha": "center", **style})

    def line(self, text: str, height: float = 0.2, **style: Any) -> None:
        """Draw one line of text at the left margin."""
        self.text(MARGIN, self.y + height / 2, text, ha="left", **style)
        self.y += height

    def box(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """Draw a rectangle with its upper left corner at (x, y)."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, **style))
        self.width = max(self.width, x + width + MARGIN)

    def arrow(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """Draw a box that ends in a point to the right, centred on y."""
        from matplotlib.patches import Polygon

        tip, half = min(0.12, width / 4), height / 2
        corners = [
            (x, y - half),
            (x + width - tip, y - half),
            (x + width, y),
            (x + width - tip, y + half),
            (x, y + half),
        ]
        self.axes.add_patch(Polygon(corners, closed=True, **style))
        self.width = max(self.width, x + width + MARGIN)

    def picture(self, image: np.ndarray | None, x: float, y: float, side: float) -> None:
        """Draw an image in a square, its proportions kept; without one, an empty frame."""
        if image is None:
            self.box(x, y, side, side, facecolor="white", edgecolor="#bbbbbb", linewidth=0.6)
            return
        height, width = (side * n / max(image.shape[:2]) for n in image.shape[:2])
        x, y = x + (side - width) / 2, y + (side - height) / 2
        smooth = "nearest" if max(image.shape[:2]) <= 64 else "antialiased"
        self.axes.imshow(
            image, extent=(x, x + width, y + height, y), aspect="auto", interpolation=smooth
        )
        self.box(x, y, width, height, facecolor="none", edgecolor="#bbbbbb", linewidth=0.6)

    def star(self, x: float, y: float, size: int) -> None:
        """Draw a star, `size` points wide."""
        self.axes.plot(
            [x],
            [y],
            marker="*",
            markersize=size,
            color=_STAR,
            markeredgecolor=INK,
            markeredgewidth=0.6,
            linestyle="none",
            zorder=5,
        )

    def save(self, png: Path) -> None:
        """Write the page to a PNG file atomically."""
        height = self.y + MARGIN
        self.figure.set_size_inches(self.width, height)
        self.axes.set(xlim=(0, self.width), ylim=(height, 0))
        self.axes.axis("off")
        with atomic_write(png) as partial:
            self.figure.savefig(partial, format="png", facecolor="white")


class Scale:
    """Maps numbers to colours from orange over white to blue, symmetric around 0."""

    def __init__(self, cells: Cells):
        from matplotlib.colors import LinearSegmentedColormap

        self.map = LinearSegmentedColormap.from_list("credit", [_BAD, _NONE, _GOOD])
        numbers = [abs(number) for row in cells for number in row if number is not None]
        self.most = max(numbers, default=0.0) or 1.0
        self.digits = min(max(2, 1 - math.floor(math.log10(self.most))), 4)

    def colour(self, number: float | None) -> Any:
        """Return the colour of a cell; grey where there is no number."""
        return _EMPTY if number is None else self.map(0.5 + number / self.most / 2)

    def ink(self, number: float | None) -> str:
        """Return a text colour that can be read on that cell."""
        return "white" if number is not None and abs(number) > 0.6 * self.most else INK

    def label(self, number: float | None) -> str:
        """Format a number with its sign; zero has none."""
        if number is None:
            return ""
        text = f"{number:+.{self.digits}f}"
        return text if text.strip("+-0.") else text[1:]

    def draw(self, canvas: Canvas, name: str) -> None:
        """Draw the legend in one line: name, colours with their ends, and what grey means."""
        y, x, width = canvas.y + 0.12, MARGIN + 1.8, 1.4
        canvas.text(MARGIN, y, name, ha="left", color=SOFT)
        canvas.text(x - 0.08, y, self.label(-self.most), ha="right")
        canvas.axes.imshow(
            np.linspace(0, 1, 128)[None],
            extent=(x, x + width, y + 0.07, y - 0.07),
            aspect="auto",
            cmap=self.map,
            vmin=0,
            vmax=1,
        )
        canvas.text(x + width + 0.08, y, self.label(self.most), ha="left")
        x += width + 0.75
        canvas.box(x, y - 0.07, 0.14, 0.14, facecolor=_EMPTY)
        canvas.text(x + 0.22, y, "not trained", ha="left", color=SOFT)
        canvas.y += 0.3

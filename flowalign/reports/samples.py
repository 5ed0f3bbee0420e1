"""Prepare the samples of a report: before and after training, prompt by prompt."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from flowalign.reports.pages import data_address
from flowalign.reports.records import Scores, card, read_json, read_scores, verdicts
from flowalign.utils.files import GRID_PADDING

_SMALL, _LARGEST = 128, 320
"""Limits of an image's longer side, in pixels: kept as PNG up to the first, reduced above the
second."""
_LOW, _WIDEST = 64, 1200
"""Limits of a film strip, in pixels: kept as PNG up to the first (height), reduced above the second
(width)."""


_FRAME_MILLISECONDS = 700
_STRIPS, _STRIP_STEPS = 4, 8
"""Largest number of prompts, and of evaluations, that are shown over training."""


@dataclass(frozen=True)
class SampleCard:
    """Samples of one prompt: an image by step, or a looping video and a film strip by step."""

    prompt: str
    pictures: list[tuple[int, str]]
    strips: list[tuple[int, str]]
    scores: dict[str, list[tuple[str, str]]]
    source: str
    """Source image of the prompt; empty if there is none."""


def samples(folder: Path) -> dict[str, Any]:
    """Return the samples and scores of each prompt, at the first and the last step with a grid."""
    index = read_json(folder / "index.json")
    prompts, num_columns, fps = index.get("prompts", []), index.get("columns", 1), index.get("fps")
    steps = sorted(index.get("steps", []))
    first = _first_grid(folder, steps)
    last = _first_grid(folder, steps[::-1])
    if not prompts or not first or not last:
        return {}
    grids = dict([first, last])
    cut = {step: cut_grid(grid, len(prompts), num_columns) for step, grid in grids.items()}
    size = cut[first[0]][0].size
    still = {step: encode_images(pictures, bool(fps)) for step, pictures in cut.items()}
    scores = [_scores(folder, step, prompts) for step in grids]
    judged = verdicts([s for s in scores if s])
    cards = []
    for i, prompt in enumerate(prompts):
        pictures = [(step, addresses[i]) for step, addresses in still.items()]
        loops = [(step, folder / f"step-{step:06}" / f"{i:03}.webp") for step in grids]
        moving = [(step, address) for step, file in loops if (address := _read_picture(file))]
        shown = (moving, pictures) if fps else (pictures, [])
        source = _read_picture(folder / "sources" / f"{i:03}.png")
        cards.append(SampleCard(prompt, *shown, card(scores, i, judged), source))
    small = size[1] <= _LOW if fps else max(size) <= _SMALL
    return {"steps": list(grids), "cards": cards, "pixelated": small, "fps": fps}


class Strip(NamedTuple):
    """Images of one fixed prompt over training."""

    prompt: str
    pictures: list[tuple[int, str]]
    """Step and address of each image, oldest first."""
    animation: str
    """Address of an animated image that shows them in turn."""


def find_strips(folder: Path) -> list[Strip]:
    """Return the images of the first fixed prompts at evenly spaced evaluations.

    The list is empty for videos, and with fewer than three readable grids.
    """
    index = read_json(folder / "index.json")
    prompts, steps = index.get("prompts", []), sorted(index.get("steps", []))
    if index.get("fps") or len(steps) < 3:
        return []
    rows: list[dict[int, Image.Image]] = [{} for _ in prompts[:_STRIPS]]
    last = min(len(steps), _STRIP_STEPS) - 1
    for step in (steps[round(i * (len(steps) - 1) / last)] for i in range(last + 1)):
        if grid := _first_grid(folder, [step]):
            pictures = cut_grid(grid[1], len(prompts), index.get("columns", 1))[:_STRIPS]
            for row, picture in zip(rows, pictures, strict=True):
                row[step] = picture
    return [
        Strip(prompt, list(zip(row, encode_images([*row.values()]), strict=True)), animate(row))
        for prompt, row in zip(prompts, rows, strict=False)
        if len(row) > 2
    ]


def animate(pictures: Mapping[int, Image.Image]) -> str:
    """Return the address of an animated WebP with a frame per step, which loops."""
    first, *others = [picture.copy() for picture in pictures.values()]
    is_small = max(first.size) <= _SMALL
    for picture in (first, *others):
        picture.thumbnail((_LARGEST, _LARGEST))
    content, options = io.BytesIO(), {"duration": _FRAME_MILLISECONDS, "loop": 0}
    first.save(content, "WEBP", save_all=True, append_images=others, lossless=is_small, **options)
    return data_address("webp", content.getvalue())


def _scores(folder: Path, step: int, prompts: Sequence[str]) -> Scores | None:
    """Return the scores of an evaluation; None if they belong to other prompts than the grid."""
    scores = read_scores(folder, step)
    if scores and [scores.keys[row][1] for row in scores.shown] == list(prompts):
        return scores
    return None


def _read_picture(file: Path) -> str:
    """Return a file as a data URL, as it was written for pages; empty if it is missing."""
    return data_address(file.suffix[1:], file.read_bytes()) if file.is_file() else ""


def _first_grid(folder: Path, steps: Sequence[int]) -> tuple[int, Image.Image] | None:
    """Return the first grid that exists and is not truncated by an interruption."""
    for step in steps:
        try:
            with Image.open(folder / f"step-{step:06}.png") as grid:
                return step, grid.convert("RGB")
        except OSError:
            continue
    return None


def cut_grid(grid: Image.Image, num_pictures: int, num_columns: int) -> list[Image.Image]:
    """Cut a grid into its images, row by row; each has GRID_PADDING pixels around it."""
    num_columns = min(num_columns, num_pictures)
    num_rows = -(-num_pictures // num_columns)
    width = (grid.width - GRID_PADDING) // num_columns
    height = (grid.height - GRID_PADDING) // num_rows
    corners = [
        (GRID_PADDING + i % num_columns * width, GRID_PADDING + i // num_columns * height)
        for i in range(num_pictures)
    ]
    return [
        grid.crop((x, y, x + width - GRID_PADDING, y + height - GRID_PADDING)) for x, y in corners
    ]


def encode_images(pictures: Sequence[Image.Image], strips: bool = False) -> list[str]:
    """Return images as data URLs; large ones are reduced to keep the page small."""
    addresses = []
    for picture in pictures:
        content = io.BytesIO()
        small = picture.height <= _LOW if strips else max(picture.size) <= _SMALL
        if small:
            picture.save(content, "PNG")
        else:
            picture.thumbnail((_WIDEST, _LARGEST) if strips else (_LARGEST, _LARGEST))
            picture.save(content, "JPEG", quality=88)
        addresses.append(data_address("png" if small else "jpeg", content.getvalue()))
    return addresses

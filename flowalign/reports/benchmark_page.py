"""Render the page of a benchmark: the table, and the best, the worst and the changed images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.reports import pages
from flowalign.utils.files import write_text

EXAMPLES = 6
"""Number of prompts in each row of images."""


@dataclass(frozen=True)
class ScoredImages:
    """Images of the first and of the last model, with the scores that order them."""

    metric: str
    """Name of the score."""
    prompts: Sequence[str]
    """Prompt of each item."""
    before: Sequence[float]
    """Scores of the first model."""
    after: Sequence[float]
    """Scores of the last model; the same as `before` if there is one model only."""
    pictures: Callable[[int], list[str]]
    """Function that returns the images of an item as data URLs, the first model's before the last
    model's."""
    paired: bool
    """Whether an item has images of two models."""


def write_benchmark(
    page: Path,
    title: str,
    table: Sequence[Sequence[str]],
    notes: Sequence[str],
    published: Sequence[Mapping[str, Any]],
    images: ScoredImages,
) -> None:
    """Write the self-contained page."""
    parts = [
        {"title": name, "items": [_show(images, i) for i in chosen]}
        for name, chosen in choose(images.before, images.after, images.prompts).items()
        if chosen
    ]
    text = pages.render(
        "benchmark.html.j2",
        title=title,
        head=table[0],
        rows=table[1:],
        notes=notes,
        published=published,
        parts=parts,
        metric=images.metric,
        paired=images.paired,
    )
    write_text(page, text)


def choose(
    before: Sequence[float], after: Sequence[float], prompts: Sequence[str]
) -> dict[str, list[int]]:
    """Return the items on the page by heading, one per prompt; ties keep the order of the file."""
    start, end = np.asarray(before, float), np.asarray(after, float)
    change = end - start

    def first(order: np.ndarray) -> list[int]:
        by_prompt: dict[str, int] = {}
        for i in map(int, order):
            by_prompt.setdefault(prompts[i], i)
        return list(by_prompt.values())[:EXAMPLES]

    up, down = np.argsort(-change, kind="stable"), np.argsort(change, kind="stable")
    return {
        "Best": first(np.argsort(-end, kind="stable")),
        "Worst": first(np.argsort(end, kind="stable")),
        "Improved most": first(up[change[up] > 0]),
        "Fell most": first(down[change[down] < 0]),
    }


def _show(images: ScoredImages, i: int) -> dict[str, Any]:
    scores = dict.fromkeys([f"{images.before[i]:.4g}", f"{images.after[i]:.4g}"])
    return {
        "prompt": images.prompts[i],
        "score": " to ".join(scores),
        "pictures": images.pictures(i),
    }

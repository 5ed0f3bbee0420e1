"""Renders `pairs.html`: numbers of pairs and drops, the widths of gaps, and the first pairs."""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from flowalign.curation.pairing.job import Found, Job, scores
from flowalign.curation.pairing.rules import Choice
from flowalign.media.decode import MediaProblem, decode
from flowalign.media.media import Media
from flowalign.media.thumbnails import UNKNOWN_RATE, looping, pictures
from flowalign.reports.charts import data_address, drawn

SHOWN = 24
"""Largest number of pairs on the page."""
_SIDE = 160
_FRAMES = 24
"""Largest number of frames of a looping video."""


def render(
    name: str, job: Job, found: Found, shown: Sequence[Choice], summary: Mapping[str, Any]
) -> str:
    """Render the page, self-contained."""
    template = Path(__file__).with_name("page_template.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        name=name,
        summary=summary,
        pairs=list(examples(job, shown[:SHOWN])),
        gaps=dict(gap_charts(found.choices)),
        dropped=[("media", found.media.summary()), ("pairs", found.pairs.summary())],
    )


def gap_charts(choices: Sequence[Choice]) -> Iterator[tuple[str, str]]:
    """Yield a histogram of the gaps of every deciding dimension, as an SVG data address."""
    for dim in dict.fromkeys(choice.dimension for choice in choices):
        gaps = [choice.gap for choice in choices if choice.dimension == dim]

        def draw(axes: Any, gaps: Sequence[float] = gaps) -> None:
            axes.hist(gaps, bins=min(40, max(5, len(set(gaps)))), color="#0072b2")
            axes.set_ylabel("pairs")
            axes.set_xlabel("gap")

        yield dim, drawn(draw, (350, 190))


def examples(job: Job, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
    """Yield what the template shows of each pair: prompt, gap, and both sides with scores."""
    for choice in choices:
        sides = [
            {
                "title": title,
                "picture": thumbnail(job.table.media[row].path),
                "scores": {dim: f"{value:.4g}" for dim, value in scores(job, row).items()},
            }
            for title, row in (("chosen", choice.winner), ("rejected", choice.loser))
        ]
        prompt, stage = job.table.media[choice.winner].prompt, choice.stage
        gap = f"{choice.dimension} +{choice.gap:.4g}" + (f", stage {stage}" if job.stages else "")
        yield {"prompt": prompt, "gap": gap, "sides": sides}


def thumbnail(path: str) -> str:
    """Return a small picture of a file as a data address; a clip moves.

    The address is empty if the file cannot be decoded.
    """
    try:
        clip = decode(Media(path), _FRAMES)
    except MediaProblem:  # validation has read the header only
        return ""
    if len(clip.pixels) > 1:
        return data_address("webp", looping(clip.pixels, clip.fps or UNKNOWN_RATE, _SIDE))
    content = io.BytesIO()
    pictures(clip.pixels, _SIDE)[0].save(content, "PNG")
    return data_address("png", content.getvalue())

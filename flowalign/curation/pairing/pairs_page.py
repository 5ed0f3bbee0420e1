"""Render `pairs.html`: numbers of pairs and drops, histograms of gaps, and the first pairs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowalign.curation.pairing.pairing_job import PairingJob, PairSelection, collect_scores
from flowalign.curation.pairing.rules import PairChoice
from flowalign.data.media.decode import MediaProblem, decode
from flowalign.data.media.media import Media
from flowalign.data.media.thumbnails import THUMBNAIL_FRAMES, encode_thumbnail
from flowalign.reports import pages
from flowalign.reports.charts import Chart, data_address, histogram

SHOWN = 24
"""Largest number of pairs on the page."""


def render(
    name: str,
    job: PairingJob,
    found: PairSelection,
    shown: Sequence[PairChoice],
    summary: Mapping[str, Any],
) -> str:
    """Return the self-contained page."""
    return pages.render(
        "pairs.html.j2",
        name=name,
        summary=summary,
        pairs=list(describe_examples(job, shown[:SHOWN])),
        gaps=chart_gaps(found.choices),
        dropped=[("media", found.media.summary()), ("pairs", found.pairs.summary())],
    )


def chart_gaps(choices: Sequence[PairChoice]) -> list[Chart]:
    """Return a histogram of the gaps of every deciding dimension."""
    dims = dict.fromkeys(choice.dimension for choice in choices)
    return [
        histogram(dim, "gap", "pairs", [c.gap for c in choices if c.dimension == dim])
        for dim in dims
    ]


def describe_examples(job: PairingJob, choices: Sequence[PairChoice]) -> Iterator[dict[str, Any]]:
    """Yield the template's values of each pair: prompt, gap, and both sides with scores."""
    for choice in choices:
        sides = [
            {
                "title": title,
                "picture": make_thumbnail(job.table.media[row].path),
                "scores": {dim: f"{value:.4g}" for dim, value in collect_scores(job, row).items()},
            }
            for title, row in (("chosen", choice.winner), ("rejected", choice.loser))
        ]
        prompt, stage = job.table.media[choice.winner].prompt, choice.stage
        gap = f"{choice.dimension} +{choice.gap:.4g}" + (f", stage {stage}" if job.stages else "")
        yield {"prompt": prompt, "gap": gap, "sides": sides}


def make_thumbnail(path: str) -> str:
    """Return a thumbnail of a file as a data URL, animated for a video.

    The URL is empty if the file cannot be decoded.
    """
    try:
        clip = decode(Media(path), THUMBNAIL_FRAMES)
    except MediaProblem:  # validation has read the header only
        return ""
    return data_address("webp", encode_thumbnail(clip.pixels, clip.fps))

"""Renders `scores.html`: the results of a scoring job, with the best and worst media."""

import heapq
import io
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from flowalign.curation.scoring.table import Row
from flowalign.data.readers import Dataset
from flowalign.functional.agreement import spearman
from flowalign.media.decode import Clip, MediaProblem, decode
from flowalign.media.thumbnails import UNKNOWN_RATE, looping, pictures
from flowalign.reports.charts import data_address, drawn
from flowalign.utils.files import write_text

EXAMPLES = 6
"""Number of media shown at either end of a dimension."""
_SIDE = 160
_FRAMES = 24
"""Largest number of frames of a looping video."""
_LISTED = 8
"""Largest number of failed rows that are listed."""
Place = tuple[str, int]
"""Id of a record, and index of a medium in it."""


@dataclass
class Findings:
    """Collects what the page needs of a table of any length: all scores, and few rows."""

    columns: dict[str, array] = field(default_factory=dict)
    """Scores of every dimension, one per row of the table; NaN where a row has none."""
    ends: dict[str, tuple[list, list]] = field(default_factory=dict)
    """Heaps of the best and of the worst rows of every dimension."""
    failures: list[Row] = field(default_factory=list)
    judged_by_people: bool = False
    rows: int = 0

    def add(self, row: Row) -> None:
        """Add one row."""
        self.rows += 1
        dims = [name.removesuffix("_valid") for name in row if name.endswith("_valid")]
        self.judged_by_people |= any(
            name.startswith(("rank/", "votes/", "rating/")) for name in row
        )
        if any(not row[f"{dim}_valid"] for dim in dims) and len(self.failures) < _LISTED:
            self.failures.append(row)
        for dim in dims:
            score = row[dim]
            self.columns.setdefault(dim, array("d")).append(np.nan if score is None else score)
            if score is not None:
                best, worst = self.ends.setdefault(dim, ([], []))
                entry = (row["record"], row["medium"], row["prompt"])
                _keep(best, (score, self.rows, entry))
                _keep(worst, (-score, self.rows, entry))

    def places(self) -> set[Place]:
        """Return the media that the page shows."""
        ends = itertools.chain.from_iterable(self.ends.values())
        return {entry[:2] for heap in ends for _, _, entry in heap}


def write(folder: Path, rows: Iterable[Row], dataset: Dataset, summary: Mapping[str, Any]) -> Path:
    """Write the page: read the rows of a finished job once, then the few media that it shows."""
    findings = Findings()
    for row in rows:
        findings.add(row)
    pictures = thumbnails(dataset, findings.places())
    page = folder / "scores.html"
    write_text(page, render(folder.name, findings, pictures, summary))
    return page


def thumbnails(dataset: Dataset, wanted: set[Place]) -> dict[Place, str]:
    """Return small pictures of media as data addresses; reads the dataset until all are found."""
    found: dict[Place, str] = {}
    records = {record for record, _ in wanted}
    for record in dataset if wanted else ():
        if record.id in records and not record.problem:
            for medium, stored in enumerate(record.media):
                if (record.id, medium) in wanted:
                    try:
                        found[record.id, medium] = _thumbnail(decode(stored, _FRAMES))
                    except MediaProblem:  # gone or changed since it was scored
                        found[record.id, medium] = ""
        if len(found) == len(wanted):
            break
    return found


def render(
    name: str, findings: Findings, pictures: Mapping[Place, str], summary: Mapping[str, Any]
) -> str:
    """Render the page, self-contained."""
    template = Path(__file__).with_name("page_template.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    dims = [_dimension(dim, findings, pictures) for dim in findings.columns]
    return environment.from_string(template).render(
        name=name,
        summary=summary,
        dims=dims,
        verdict=verdict(findings, summary),
        correlations=correlation_chart(findings.columns),
        failures=list(failures(findings)),
        judged_by_people=findings.judged_by_people,
        examples=EXAMPLES,
    )


def verdict(findings: Findings, summary: Mapping[str, Any]) -> str:
    """Summarize the outcome in a sentence or two."""
    rows, failed = summary["rows"], summary["failed"]
    speed = summary.get("rows_per_second")
    text = f"{rows:,} media scored in {len(findings.columns)} dimensions"
    text += f", {speed:,.1f} a second. " if speed else ". "
    share = 100 * failed / rows if rows else 0.0
    return text + (f"{failed:,} ({share:.1f} %) could not be scored." if failed else "None failed.")


def failures(findings: Findings) -> Iterator[dict[str, str]]:
    """Yield the first rows that failed, and why."""
    for row in findings.failures:
        yield {"record": f"{row['record']}, medium {row['medium']}", "why": row["reason"] or ""}


def histogram(scores: np.ndarray) -> str:
    """Draw a histogram of scores, as an SVG data address."""

    def draw(axes: Any) -> None:
        axes.hist(scores, bins=min(40, max(5, len(np.unique(scores)))), color="#0072b2")
        axes.axvline(np.median(scores), color="#d55e00", linewidth=1.2)
        axes.set_ylabel("media")
        axes.set_xlabel("score (line: median)")

    return drawn(draw, (350, 190))


def correlation_chart(columns: Mapping[str, Sequence[float]]) -> str:
    """Draw Spearman correlations of all pairs of dimensions, over media valid in both.

    The address of the SVG is empty if there is only one dimension.
    """
    if len(columns) < 2:
        return ""
    scores = [torch.tensor(column, dtype=torch.float64) for column in columns.values()]
    table = np.full((len(scores), len(scores)), np.nan)
    for i, j in itertools.product(range(len(scores)), repeat=2):
        both = scores[i].isfinite() & scores[j].isfinite()
        if both.sum() > 2:
            table[i, j] = float(spearman(scores[i][both], scores[j][both]))

    def draw(axes: Any) -> None:
        axes.imshow(table, cmap="RdBu_r", vmin=-1, vmax=1)
        for (i, j), number in np.ndenumerate(table):
            text = "-" if np.isnan(number) else f"{number:.2f}"
            ink = "white" if abs(number) > 0.6 else "black"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks(range(len(columns)), list(columns), rotation=40, ha="right")
        axes.set_yticks(range(len(columns)), list(columns))
        axes.grid(visible=False)

    side = 130 + 44 * len(columns)
    return drawn(draw, (side, side))


def _dimension(dim: str, findings: Findings, pictures: Mapping[Place, str]) -> dict[str, Any]:
    scores = np.array(findings.columns[dim])
    known = scores[np.isfinite(scores)]
    quantiles = [f"{q:.4g}" for q in np.quantile(known, (0.05, 0.5, 0.95))] if len(known) else []
    best, worst = findings.ends.get(dim, ([], []))
    return {
        "name": dim,
        "valid": len(known),
        "rows": len(scores),
        "mean": f"{known.mean():.4g}" if len(known) else "-",
        "std": f"{known.std():.3g}" if len(known) else "-",
        "quantiles": quantiles,
        "chart": histogram(known) if len(known) else "",
        "ends": [("best", _shown(best, 1, pictures)), ("worst", _shown(worst, -1, pictures))],
    }


def _shown(heap: list, sign: int, pictures: Mapping[Place, str]) -> list[dict[str, str]]:
    ordered = sorted(heap, key=lambda entry: (-entry[0], -entry[1]))
    return [
        {
            "score": f"{sign * score:.4g}",
            "prompt": prompt,
            "record": record,
            "picture": pictures.get((record, medium), ""),
        }
        for score, _, (record, medium, prompt) in ordered
    ]


def _keep(heap: list, entry: tuple[float, int, Any]) -> None:
    """Add an entry to a heap of the highest scores; among equal scores, the first stays."""
    score, row, what = entry
    if len(heap) < EXAMPLES:
        heapq.heappush(heap, (score, -row, what))
    else:
        heapq.heappushpop(heap, (score, -row, what))


def _thumbnail(clip: Clip) -> str:
    if len(clip.pixels) > 1:
        return data_address("webp", looping(clip.pixels, clip.fps or UNKNOWN_RATE, _SIDE))
    content = io.BytesIO()
    pictures(clip.pixels, _SIDE)[0].save(content, "WEBP", quality=85)
    return data_address("webp", content.getvalue())

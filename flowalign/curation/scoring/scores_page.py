"""Summarize a table of scores: as `scores.html` with the best and worst samples, or by prompt."""

import heapq
import itertools
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from flowalign.curation.scoring.part_files import REFERENCES, Row
from flowalign.data.media.encode import read_thumbnail
from flowalign.data.media.media import MediaProblem
from flowalign.data.readers import Dataset
from flowalign.functional.agreement import spearman
from flowalign.reports import pages
from flowalign.reports.pages import PALETTE, data_address, histogram
from flowalign.utils.files import read_object, write_text

EXAMPLES = 6
"""Number of samples shown at either end of a dimension."""
_LISTED = 8
"""Largest number of failed rows that are listed."""
Place = tuple[str, int]
"""Id of a record, and index of a sample in it."""


@dataclass
class Findings:
    """Page data of a table of any length: all scores, and a few rows."""

    columns: dict[str, array] = field(default_factory=dict)
    """Scores of every dimension, one per row of the table; NaN if a row has none."""
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
                name = Path(row["path"]).name if row["path"] else str(row["record"])
                entry = (row["record"], row["medium"], row["prompt"], name)
                _keep(best, (score, self.rows, entry))
                _keep(worst, (-score, self.rows, entry))

    def places(self) -> set[Place]:
        """Return the samples that the page shows."""
        ends = itertools.chain.from_iterable(self.ends.values())
        return {entry[:2] for heap in ends for _, _, entry in heap}


def write(folder: Path, rows: Iterable[Row], dataset: Dataset) -> Path:
    """Write the page; read the rows of a finished job once, then only the samples on the page."""
    findings = Findings()
    for row in rows:
        findings.add(row)
    thumbnails = make_thumbnails(dataset, findings.places())
    page = folder / "scores.html"
    summary = read_object(folder / "summary.json")
    write_text(page, render(folder.name, findings, thumbnails, summary))
    return page


def make_thumbnails(dataset: Dataset, wanted: set[Place]) -> dict[Place, str]:
    """Return thumbnails of samples as data URLs; read the dataset until all are found."""
    found: dict[Place, str] = {}
    records = {record for record, _ in wanted}
    for record in dataset if wanted else ():
        if record.id in records and not record.problem:
            for medium, stored in enumerate(record.media):
                if (record.id, medium) in wanted:
                    try:
                        found[record.id, medium] = data_address("webp", read_thumbnail(stored))
                    except MediaProblem:  # gone or changed since it was scored
                        found[record.id, medium] = ""
        if len(found) == len(wanted):
            break
    return found


def render(
    name: str, findings: Findings, thumbnails: Mapping[Place, str], summary: Mapping[str, Any]
) -> str:
    """Return the self-contained page."""
    dims = [_describe_dimension(dim, findings, thumbnails) for dim in findings.columns]
    return pages.render(
        "scores.html.j2",
        name=name,
        summary=summary,
        dims=dims,
        verdict=verdict(findings, summary),
        correlations=tabulate_correlations(findings.columns),
        failures=list(describe_failures(findings)),
        judged_by_people=findings.judged_by_people,
        examples=EXAMPLES,
    )


def verdict(findings: Findings, summary: Mapping[str, Any]) -> str:
    """Return a summary of the job in one or two sentences."""
    rows, failed = summary["rows"], summary["failed"]
    speed = summary.get("rows_per_second")
    text = f"{rows:,} samples scored in {len(findings.columns)} dimensions"
    text += f", {speed:,.1f} a second. " if speed else ". "
    share = 100 * failed / rows if rows else 0.0
    return text + (f"{failed:,} ({share:.1f} %) could not be scored." if failed else "None failed.")


def describe_failures(findings: Findings) -> Iterator[dict[str, str]]:
    """Yield the first rows that failed, with the reason."""
    for row in findings.failures:
        yield {"record": f"{row['record']}, medium {row['medium']}", "why": row["reason"] or ""}


def tabulate_correlations(
    columns: Mapping[str, Sequence[float]],
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return Spearman correlations of all pairs of dimensions, over samples valid in both.

    Each row is a name and its cells, as text and colour. The table is empty if there is only one
    dimension.
    """
    if len(columns) < 2:
        return []
    scores = {name: torch.tensor(column).double() for name, column in columns.items()}
    return [
        (name, [_correlation_cell(one, other) for other in scores.values()])
        for name, one in scores.items()
    ]


def _correlation_cell(one: torch.Tensor, other: torch.Tensor) -> tuple[str, str]:
    both = one.isfinite() & other.isfinite()
    number = float(spearman(one[both], other[both])) if both.sum() > 2 else math.nan
    if not math.isfinite(number):
        return "-", "none"
    colour = PALETTE[0] if number > 0 else PALETTE[1]
    return f"{number:.2f}", f"{colour}{round(160 * abs(number)):02x}"


def _describe_dimension(
    dim: str, findings: Findings, thumbnails: Mapping[Place, str]
) -> dict[str, Any]:
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
        "ties": len(known) - len(np.unique(known)),
        "chart": histogram(dim, "score (line: median)", "media", known) if len(known) else None,
        "ends": [
            ("best", _describe_media(best, 1, thumbnails)),
            ("worst", _describe_media(worst, -1, thumbnails)),
        ],
    }


def _describe_media(heap: list, sign: int, thumbnails: Mapping[Place, str]) -> list[dict[str, str]]:
    ordered = sorted(heap, key=lambda entry: (-entry[0], -entry[1]))
    return [
        {
            "score": f"{sign * score:.4g}",
            "prompt": prompt,
            "name": name,
            "picture": thumbnails.get((record, medium), ""),
        }
        for score, _, (record, medium, prompt, name) in ordered
    ]


def _keep(heap: list, entry: tuple[float, int, Any]) -> None:
    """Add an entry to a heap of the highest scores; among equal scores, the first stays."""
    score, row, what = entry
    if len(heap) < EXAMPLES:
        heapq.heappush(heap, (score, -row, what))
    else:
        heapq.heappushpop(heap, (score, -row, what))


FILE = "prompts.jsonl"


def average_prompts(rows: Iterable[Row], prefix: str) -> list[dict[str, Any]]:
    """Return a row for each prompt, with the mean of its valid scores in each dimension.

    The column of a dimension is its name after `prefix`. A dimension without a valid score has no
    column. Prompts keep the order of their first samples.

    Raises:
        ValueError: A sample has no prompt, or references, which a prompt alone does not identify.
    """
    scores: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if not row["prompt"] or row.get(REFERENCES):
            raise ValueError(
                f"record {row['record']} has {'references' if row['prompt'] else 'no prompt'}; "
                "--summarize averages samples of one prompt without references"
            )
        found = scores.setdefault(row["prompt"], {})
        for dim in (name.removesuffix("_valid") for name in row if name.endswith("_valid")):
            if row[dim] is not None:
                found.setdefault(prefix + dim, []).append(row[dim])
    return [
        {"prompt": prompt, **{name: fmean(values) for name, values in found.items()}}
        for prompt, found in scores.items()
    ]


def write_prompts(folder: Path, rows: Iterable[Row], prefix: str) -> Path:
    """Write the averages of `average_prompts` to `prompts.jsonl`, and return its path."""
    means = average_prompts(rows, prefix)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in means]
    write_text(folder / FILE, "".join(lines))
    return folder / FILE

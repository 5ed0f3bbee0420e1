"""Summarize a table of scores: as `scores.html` with the best and worst samples, or by prompt."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from flowalign.curation.scoring.part_files import REFERENCES
from flowalign.curation.scoring.stats import EXAMPLES, Row, RunningStats, dims_of
from flowalign.data.readers import Dataset
from flowalign.functional.agreement import spearman
from flowalign.reports import pages
from flowalign.reports.pages import PALETTE, data_address, histogram
from flowalign.utils.files import read_object, write_text
from flowalign.utils.media.encode import read_thumbnail
from flowalign.utils.media.media import MediaProblem

PAGE, PROMPTS = "scores.html", "prompts.jsonl"
Place = tuple[str, int]
"""Id of a record, and index of a sample in it."""


def write_page(folder: Path, dataset: Dataset, stats: RunningStats) -> None:
    """Write the page of a finished job; only the samples on the page are read again."""
    rows = [row for heaps in stats.ends.values() for heap in heaps for _, _, row in heap]
    thumbnails = make_thumbnails(dataset, {(row["record"], row["medium"]) for row in rows})
    summary = read_object(folder / "summary.json")
    write_text(folder / PAGE, render(folder.name, stats, thumbnails, summary))


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
    name: str, stats: RunningStats, thumbnails: Mapping[Place, str], summary: Mapping[str, Any]
) -> str:
    """Return the self-contained page."""
    return pages.render(
        "scores.html.j2",
        name=name,
        summary=summary,
        dims=[_describe_dimension(dim, stats, thumbnails) for dim in stats.columns],
        verdict=verdict(len(stats.columns), summary),
        correlations=tabulate_correlations(stats.columns),
        failures=[
            {"record": f"{row['record']}, medium {row['medium']}", "why": row["reason"] or ""}
            for row in stats.failures
        ],
        judged_by_people=stats.judged_by_people,
        examples=EXAMPLES,
    )


def verdict(dimensions: int, summary: Mapping[str, Any]) -> str:
    """Return a summary of the job in one or two sentences."""
    rows, failed = summary["rows"], summary["failed"]
    speed = summary.get("rows_per_second")
    text = f"{rows:,} samples scored in {dimensions} dimensions"
    text += f", {speed:,.1f} a second. " if speed else ". "
    share = 100 * failed / rows if rows else 0.0
    return text + (f"{failed:,} ({share:.1f} %) could not be scored." if failed else "None failed.")


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
    dim: str, stats: RunningStats, thumbnails: Mapping[Place, str]
) -> dict[str, Any]:
    scores = np.array(stats.columns[dim])
    known = scores[np.isfinite(scores)]
    quantiles = [f"{q:.4g}" for q in np.quantile(known, (0.05, 0.5, 0.95))] if len(known) else []
    best, worst = stats.ends.get(dim, ([], []))
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
            ("best", _describe_media(dim, best, thumbnails)),
            ("worst", _describe_media(dim, worst, thumbnails)),
        ],
    }


def _describe_media(dim: str, heap: list, thumbnails: Mapping[Place, str]) -> list[dict[str, str]]:
    return [
        {
            "score": f"{row[dim]:.4g}",
            "prompt": row["prompt"],
            "name": Path(row["path"]).name if row["path"] else str(row["record"]),
            "picture": thumbnails.get((row["record"], row["medium"]), ""),
        }
        for _, _, row in sorted(heap, reverse=True)
    ]


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
        for dim in dims_of(row):
            if row[dim] is not None:
                found.setdefault(prefix + dim, []).append(row[dim])
    return [
        {"prompt": prompt, **{name: fmean(values) for name, values in found.items()}}
        for prompt, found in scores.items()
    ]

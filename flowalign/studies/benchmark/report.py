"""Compute the numbers of a finished benchmark, and write tables and page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flowalign.data.media.decode import decode
from flowalign.data.media.media import Media
from flowalign.data.media.thumbnails import THUMBNAIL_FRAMES, encode_thumbnail
from flowalign.reports.benchmark_page import ScoredImages, write_benchmark
from flowalign.reports.charts import data_address
from flowalign.studies.benchmark import results as tables
from flowalign.studies.benchmark.benchmark_job import BenchmarkJob
from flowalign.studies.benchmark.card import Card
from flowalign.studies.benchmark.deviations import Used, find_deviations
from flowalign.studies.benchmark.external import read_scores
from flowalign.studies.benchmark.items import BenchmarkItem, collect
from flowalign.studies.benchmark.statistics import Table, compute_lines, join_dimensions
from flowalign.studies.benchmark.vbench import read_results
from flowalign.types import Request


@dataclass(frozen=True)
class BenchmarkRun:
    """Benchmark with the models to evaluate."""

    name: str
    """Name of the card."""
    card: Card
    """Protocol."""
    job: BenchmarkJob
    """Models, prompts and settings."""
    used: Used
    """Settings to compare with the card."""
    scores: Sequence[str] | None = None
    """Files with the scores of an official tool. None: the job scores the images."""


def write_report(run: BenchmarkRun) -> str:
    """Write the results of all images, and return the table as Markdown.

    Raises:
        ValueError: Images or scores are missing.
    """
    job, card = run.job, run.card
    items = _read_items(run)
    cluster = _number_prompts(job.sampler.requests)
    data = [_build_table(card, some, job.sampler.requests, cluster) for some in items]
    differing, left_open = find_deviations(card, run.used)
    results = tables.Results(
        run.name,
        card,
        [model.name for model in job.models],
        [model.digest for model in job.models],
        compute_lines(card, data),
        differing,
        left_open,
        job.settings,
        len({item.place for item in items[0]}),
    )
    out = job.sampler.out
    tables.write_results(out, results)
    write_benchmark(
        out / "results.html",
        card.title,
        [tables.heads(results), *tables.rows(results)],
        tables.describe(results),
        [asdict(one) for one in card.published],
        _scored_images(run, items, data),
    )
    return tables.to_markdown(results)


def _read_items(run: BenchmarkRun) -> list[list[BenchmarkItem]]:
    job, card = run.job, run.card
    names = [model.name for model in job.models]
    dims = () if run.scores else job.dims
    items = [collect(job.folder(m), job.blocks, dims, m.name) for m in job.models]
    if run.scores is None:
        return items
    places = [place for block in job.blocks for place in block]
    if card.output == "vbench":
        return read_results(run.scores, card, names, places, job.sampler.requests)
    if len(run.scores) > 1:
        raise ValueError(f"--scores of {card.title} is one file for all models")
    return read_scores(run.scores[0], card, names, places, _scored_columns(run))


def _scored_columns(run: BenchmarkRun) -> list[str]:
    """Return the group columns that the prompt file does not have."""
    columns = dict.fromkeys(metric.group for metric in run.card.metrics if metric.group)
    known = run.job.sampler.requests[0].metadata
    return [column for column in columns if column not in known]


def _number_prompts(requests: Sequence[Request]) -> list[int]:
    """Return the index of each row's distinct prompt."""
    place: dict[bytes, int] = {}
    return [place.setdefault(request.input_digest, len(place)) for request in requests]


def _build_table(
    card: Card, items: Sequence[BenchmarkItem], requests: Sequence[Request], cluster: Sequence[int]
) -> Table:
    """Return the columns of the items of one model."""
    groups = {
        column: [_find_group(item, column, requests[item.row].metadata) for item in items]
        for column in dict.fromkeys(metric.group for metric in card.metrics if metric.group)
    }
    scores = {
        dim: torch.tensor([item.scores[dim] for item in items], dtype=torch.float64)
        for dim in card.dims
    }
    return Table(scores, groups, torch.tensor([cluster[item.row] for item in items]))


def _find_group(item: BenchmarkItem, column: str, metadata: Mapping[str, Any]) -> str:
    found = (item.groups or {}).get(column, metadata.get(column))
    if found is None:
        raise ValueError(f"row {item.row} of the prompt file has no column {column!r}")
    return str(found)


def _scored_images(
    run: BenchmarkRun, items: Sequence[Sequence[BenchmarkItem]], data: Sequence[Table]
) -> ScoredImages:
    """Return the images of the first and of the last model, ordered by the first metric."""
    job = run.job
    metric = next(metric for metric in run.card.metrics if metric.dims)
    ends = list(dict.fromkeys([0, len(job.models) - 1]))
    folders = [job.folder(job.models[i]) for i in ends]
    scores = [join_dimensions(metric, data[i]).tolist() for i in ends]
    return ScoredImages(
        metric.name,
        [job.sampler.requests[item.row].prompt for item in items[0]],
        scores[0],
        scores[-1],
        lambda i: [_read_thumbnail(folder.media(items[0][i].place)) for folder in folders],
        len(ends) > 1,
    )


def _read_thumbnail(file: Path) -> str:
    clip = decode(Media(str(file)), THUMBNAIL_FRAMES)
    return data_address("webp", encode_thumbnail(clip.pixels, clip.fps))

"""Write the results of a benchmark: its numbers, tables and page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from flowalign.functional.resampling import number_values
from flowalign.reports.pages import data_address, render
from flowalign.studies.benchmark.benchmark_job import BenchmarkJob
from flowalign.studies.benchmark.card import Card, Published
from flowalign.studies.benchmark.external import read_results, read_scores
from flowalign.studies.benchmark.items import BenchmarkItem, collect
from flowalign.studies.benchmark.statistics import (
    REPEATS,
    Estimate,
    ResultLine,
    Table,
    compute_lines,
    join_dimensions,
)
from flowalign.types import Request
from flowalign.utils.files import write_json, write_text
from flowalign.utils.media.encode import read_thumbnail
from flowalign.utils.media.media import Media

EXAMPLES = 6
"""Number of prompts in each row of images."""
INTERVAL = (
    f"Brackets: 95 % interval of {REPEATS} bootstrap resamples of whole prompts; "
    "differences use the same resamples for both models."
)
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
Cells = Sequence[Sequence[str]]
"""Rows of a table as text, the heads first."""


def write_report(job: BenchmarkJob) -> str:
    """Write the results of all images, and return the table as Markdown.

    Raises:
        ValueError: Images or scores are missing.
    """
    card, out = job.card, job.sampler.out
    items = _read_items(job)
    tables = [_build_table(card, some, job.sampler.requests) for some in items]
    lines = compute_lines(card, tables)
    images = len({item.place for item in items[0]})
    content = {
        "benchmark": job.settings["benchmark"],
        "title": card.title,
        "source": card.source,
        "models": [model.name for model in job.models],
        "weights": {model.name: model.digest for model in job.models},
        "images": images,
        "resamples": REPEATS,
        "lines": [asdict(line) for line in lines],
        "deviations": [asdict(one) for one in job.deviations],
        "not_fixed": [asdict(one) for one in job.left_open],
        "published": [asdict(one) for one in card.published],
        "settings": dict(job.settings),
    }
    cells, notes = make_cells(content["models"], lines), describe(job, images)
    markdown = to_markdown(cells, notes, card.published)
    write_json(out / "results.json", content)
    write_text(out / "results.md", markdown)
    write_text(out / "results.tex", to_latex(cells, notes))
    metric = next(metric for metric in card.metrics if metric.dims)
    scores = [join_dimensions(metric, table).tolist() for table in (tables[0], tables[-1])]
    page = render(
        "benchmark.html.j2",
        title=card.title,
        cells=cells,
        notes=notes,
        published=card.published,
        parts=_show_examples(job, items[0], *scores),
        metric=metric.name,
        paired=len(job.models) > 1,
    )
    write_text(out / "results.html", page)
    return markdown


def _read_items(job: BenchmarkJob) -> list[list[BenchmarkItem]]:
    """Return the items of each model."""
    card, requests = job.card, job.sampler.requests
    dims = () if job.scores else card.dims
    items = [collect(job.folder(m), job.blocks, dims, m.name) for m in job.models]
    if job.scores is None:
        return items
    names = [model.name for model in job.models]
    places = [place for block in job.blocks for place in block]
    if card.output == "vbench":
        return read_results(job.scores, card, names, places, requests)
    if len(job.scores) > 1:
        raise ValueError(f"--scores of {card.title} is one file for all models")
    columns = [column for column in card.columns if column not in requests[0].metadata]
    return read_scores(job.scores[0], card, names, places, columns)


def _build_table(card: Card, items: Sequence[BenchmarkItem], requests: Sequence[Request]) -> Table:
    """Return the columns of the items of one model."""
    groups = {
        column: [_find_group(item, column, requests[item.row].metadata) for item in items]
        for column in card.columns
    }
    scores = {
        dim: torch.tensor([item.scores[dim] for item in items], dtype=torch.float64)
        for dim in card.dims
    }
    prompts = number_values([request.input_digest for request in requests])
    return Table(scores, groups, prompts[[item.row for item in items]])


def _find_group(item: BenchmarkItem, column: str, metadata: Mapping[str, Any]) -> str:
    found = (item.groups or {}).get(column, metadata.get(column))
    if found is None:
        raise ValueError(f"row {item.row} of the prompt file has no column {column!r}")
    return str(found)


def make_cells(models: Sequence[str], lines: Sequence[ResultLine]) -> Cells:
    """Return the heads and the rows of the table as text; `models` begin with the base."""
    trained = models[1:]
    later = ["change"] if len(trained) == 1 else [f"change: {name}" for name in trained]
    rows = [
        [
            f"{line.metric}: {line.group}" if line.group else line.metric,
            str(line.prompts),
            *(show(one) for one in line.scores),
            *(show(one, signed=True) for one in line.differences),
        ]
        for line in lines
    ]
    return [["metric", "prompts", *models, *later], *rows]


def show(one: Estimate, signed: bool = False) -> str:
    """Return a number with its interval, such as `53.1 [50.2, 56.0]`.

    The decimals show two digits of the half width of the interval.
    """
    half = (one.high - one.low) / 2
    digits = min(max(1 - math.floor(math.log10(half)), 0), 6) if half > 0 else 3
    form = f"{'+' if signed else ''}.{digits}f"
    if math.isnan(one.low):
        return f"{one.value:{form}} [no interval]"
    return f"{one.value:{form}} [{one.low:{form}}, {one.high:{form}}]"


def describe(job: BenchmarkJob, images: int) -> list[str]:
    """Return sentences on deviations and open settings."""
    differing = [
        f"Deviation: {one.setting} is {one.here}, the card says {one.card}."
        for one in job.deviations
    ]
    return [
        f"{job.card.title} ({job.card.source}), {images} images per model. {INTERVAL}",
        *(differing or ["No deviation from the card."]),
        *(f"Not fixed by the authors: {one.setting}, here {one.here}." for one in job.left_open),
        "Initial noises are those of flowalign, so images differ from those of the official "
        "script.",
    ]


def to_markdown(cells: Cells, notes: Sequence[str], published: Sequence[Published]) -> str:
    """Return the table with deviations and published numbers."""
    rows = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    text = [
        " | ".join(["", *(cell.replace("|", "\\|") for cell in row), ""]).strip() for row in rows
    ]
    text += ["", *(f"- {sentence}" for sentence in notes)]
    if published:
        text += ["", "| published | metric | value | settings | source |", "|---|---|---|---|---|"]
        text += [
            f"| {one.model} | {one.metric} | {one.value:g} | {one.settings} | {one.source} |"
            for one in published
        ]
    return "\n".join(text) + "\n"


def to_latex(cells: Cells, notes: Sequence[str]) -> str:
    """Return the table for the package booktabs, with the deviations as comments."""
    escaped = [["".join(_LATEX.get(c, c) for c in cell) for cell in row] for row in cells]
    head, *rows = [" & ".join(row) + r" \\" for row in escaped]
    lines = [f"% {sentence}" for sentence in notes]
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(cells[0]) - 1)}}}", "\\toprule", head]
    lines += ["\\midrule", *rows, "\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines) + "\n"


def _show_examples(
    job: BenchmarkJob,
    items: Sequence[BenchmarkItem],
    before: Sequence[float],
    after: Sequence[float],
) -> list[dict[str, Any]]:
    """Return the rows of images on the page: the items of the first model in several orders.

    `before` and `after` are scores of the first and of the last model; ties keep the order of the
    file.
    """
    folders = [job.folder(model) for model in dict.fromkeys((job.models[0], job.models[-1]))]
    prompts = [job.sampler.requests[item.row].prompt for item in items]

    def show_item(i: int) -> dict[str, Any]:
        scores = dict.fromkeys([f"{before[i]:.4g}", f"{after[i]:.4g}"])
        files = [Media(str(folder.media(items[i].place))) for folder in folders]
        pictures = [data_address("webp", read_thumbnail(file)) for file in files]
        return {"prompt": prompts[i], "score": " to ".join(scores), "pictures": pictures}

    return [
        {"title": title, "items": [show_item(i) for i in chosen]}
        for title, chosen in choose(before, after, prompts).items()
        if chosen
    ]


def choose(
    before: Sequence[float], after: Sequence[float], prompts: Sequence[str]
) -> dict[str, list[int]]:
    """Return the items on the page by heading, one per prompt; ties keep the order of the file."""
    end = np.asarray(after, float)
    change = end - np.asarray(before, float)

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

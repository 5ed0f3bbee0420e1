"""Sample and score the items of a benchmark, block by block; compute the numbers of all blocks."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from flowalign.data.media.decode import decode
from flowalign.data.media.encode import read_thumbnail, write_clip, write_picture
from flowalign.data.media.media import Media
from flowalign.reports.pages import data_address
from flowalign.reports.study_pages import ScoredImages, write_benchmark
from flowalign.rewards.composite import Rewards
from flowalign.runs.sampling_job import SamplingJob
from flowalign.studies.benchmark import results as tables
from flowalign.studies.benchmark.card import Card
from flowalign.studies.benchmark.external import read_results, read_scores
from flowalign.studies.benchmark.items import (
    BenchmarkItem,
    ModelFolder,
    Place,
    collect,
    split_blocks,
    summarise,
)
from flowalign.studies.benchmark.results import Used, find_deviations
from flowalign.studies.benchmark.statistics import Table, compute_lines, join_dimensions
from flowalign.types import Request
from flowalign.utils.console import Progress
from flowalign.utils.folders import record_settings
from flowalign.utils.seeds import generator

MANIFEST, MAKER = "benchmark.json", "`flowalign eval --benchmark`"
BASE = "base"
"""Name of the model before training."""


@dataclass(frozen=True)
class BenchmarkModel:
    """Weights that are evaluated."""

    name: str
    """Name in tables: `base`, or the folder as the user gave it."""
    weights: str | None
    """Folder with trained weights. None: those of the policy."""
    digest: str
    """Hash of the trained weights; `base` without any."""


@dataclass(frozen=True)
class BenchmarkJob:
    """Models, prompts and settings of one benchmark."""

    sampler: SamplingJob
    """Run file, requests, steps, seed and copies; its weights are not used."""
    rewards: Rewards | None
    """Scorers. None: the official tool scores the images."""
    dims: Sequence[str]
    """Dimensions that every item needs."""
    models: Sequence[BenchmarkModel]
    """Models, the base first."""
    settings: Mapping[str, Any]
    """Settings that determine images and scores, equal for all models."""
    shard: tuple[int, int] = (0, 1)
    """Index and number of shards. A shard takes every n-th block."""

    @cached_property
    def blocks(self) -> list[list[Place]]:
        """Return the items in blocks."""
        one = self.sampler
        return split_blocks(len(one.requests), one.count, one.micro_batch)

    def folder(self, model: BenchmarkModel) -> ModelFolder:
        """Return the files of a model."""
        text = summarise({**self.settings, "weights": model.digest})
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        suffix = ".mp4" if self.sampler.fps else ".png"
        return ModelFolder(self.sampler.out / model.digest, digest, suffix)

    def run(self) -> int:
        """Sample and score the unfinished blocks of this shard; return the number of new images.

        Raises:
            ValueError: The folder was made with other settings.
        """
        self.sampler.out.mkdir(parents=True, exist_ok=True)
        record_settings(self.sampler.out / MANIFEST, self.settings, MAKER)
        todo = {model.name: list(self._find_unfinished(model)) for model in self.models}
        made, start = 0, time.perf_counter()
        if not any(todo.values()):
            return made
        self.sampler.load()
        if self.rewards:
            self.rewards.load()
        with Progress(sum(map(len, todo.values())), console=Console(stderr=True)) as progress:
            done = 0
            for model in self.models:
                if model.weights and todo[model.name]:
                    self.sampler.run.policy.load_weights(model.weights)
                for block in todo[model.name]:
                    made += self._complete(self.folder(model), block)
                    seconds = time.perf_counter() - start
                    progress.update(done, {"throughput": made / seconds})
                    done += 1
        return made

    def _find_unfinished(self, model: BenchmarkModel) -> Iterator[int]:
        """Yield the blocks of this shard that lack images or scores."""
        i, n = self.shard
        folder = self.folder(model)
        for block in range(i, len(self.blocks), n):
            if not folder.is_done(block, self.blocks[block], self.dims if self.rewards else ()):
                yield block

    def _complete(self, folder: ModelFolder, block: int) -> int:
        """Make the missing images of a block, then score its files; return the number made."""
        places = self.blocks[block]
        absent = [place for place in places if not folder.media(place).is_file()]
        if absent:
            for place, frames in zip(places, self._sample(places), strict=True):
                if place in absent:
                    _write(folder.media(place), frames, self.sampler.fps)
        folder.write(block, self._score(folder, places))
        return len(absent)

    def _sample(self, places: Sequence[Place]) -> Float[Tensor, "n F 3 H W"]:
        one = self.sampler
        seeds = [generator(one.seed, "benchmark", *place) for place in places]
        return one.media(self._requests(places), seeds)

    def _requests(self, places: Sequence[Place]) -> list[Request]:
        return [self.sampler.requests[place.row] for place in places]

    def _score(self, folder: ModelFolder, places: Sequence[Place]) -> list[BenchmarkItem]:
        """Return the items with the scores of their files."""
        if self.rewards is None:
            return [BenchmarkItem(*place, {}) for place in places]
        media = torch.stack([_read(folder.media(place)) for place in places])
        batch = self.rewards.batch(media, self._requests(places), (), self.sampler.fps)
        output = self.rewards.score(batch)
        items = []
        for i, place in enumerate(places):
            row = zip(self.rewards.dims, output.values[i].tolist(), output.valid[i], strict=True)
            scores = {dim: value if valid else None for dim, value, valid in row}
            items.append(BenchmarkItem(*place, scores, output.reasons.get(i, "")))
        return items


def _write(file: Path, frames: Float[Tensor, "F 3 H W"], fps: float | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if fps:
        write_clip(file, frames, fps)
    else:
        write_picture(file, frames[0], alone=True)


def _read(file: Path) -> Float[Tensor, "F 3 H W"]:
    return decode(Media(str(file))).pixels.float() / 255


def _show(file: Path) -> str:
    return data_address("webp", read_thumbnail(Media(str(file))))


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
        lambda i: [_show(folder.media(items[0][i].place)) for folder in folders],
        len(ends) > 1,
    )

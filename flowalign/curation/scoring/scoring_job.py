"""Run a scoring job: decode ahead, batch by shape, score, save in parts, and resume."""

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowalign.curation.scoring.part_files import FIXED, PartFiles, merge
from flowalign.curation.scoring.scores_page import PROMPTS, average_prompts, write_page
from flowalign.curation.scoring.stats import Progress, RunningStats, TooManyFailures
from flowalign.curation.scoring.table_rows import (
    Column,
    DecodedMedium,
    assemble,
    join_fingerprints,
    make_unscored_row,
    prepare,
    score,
)
from flowalign.data.media_record import Record
from flowalign.data.readers import Dataset
from flowalign.rewards.checked import CheckedReward, load
from flowalign.types import RewardModel
from flowalign.utils.console import say
from flowalign.utils.files import read_object, write_rows, write_text
from flowalign.utils.folders import compare_settings, record_settings
from flowalign.utils.ranges import PositiveInt, UnitInterval, require_ranges

MANIFEST, MAKER = "manifest.json", "a scoring job"
RECORDS_PER_PART = 256
"""Records of a block: a file that is complete once it exists. Batches never cross a block, so its
last batch may be smaller, and a killed job continues with the bytes of an uninterrupted one. Shards
are blocks modulo processes; Ray workers take the next free block."""
_MEMORY = 1 << 29
"""Bytes of decoded pixels that may wait for a batch; unfinished batches may hold the same
amount."""
_BATCH_BYTES = 1 << 27
"""Bytes of decoded pixels of a batch that is full with fewer than `batch_size` items; models get
four times as many, in float32."""
_BATCHES_AHEAD = 2
ROWS_BEFORE_CHECK = 100


@dataclass(frozen=True)
class ScoringJob:
    """Scoring job: a dataset, reward models, and the folder of the results."""

    dataset: Dataset
    models: Sequence[RewardModel]
    folder: Path
    batch_size: PositiveInt = 32
    """Number of images or videos per call of a model."""
    workers: PositiveInt = 4
    """Number of decoder threads."""
    limit: PositiveInt | None = None
    """Number of records to score, from the first one. None: all."""
    max_frames: PositiveInt | None = None
    """Largest number of evenly spaced frames of a video. None: all."""
    max_failed_fraction: UnitInterval = 0.05
    """Share of failed rows, in [0, 1], above which the job stops."""
    shard: tuple[int, int] = (0, 1)
    """Shard (i, n): this process scores every n-th block of records, beginning with the i-th."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the dataset and the models, which must be the same when the job is repeated."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range, or if two columns would have one name."""
        require_ranges(self)
        dims = [dim for model in self.models for dim in model.spec.dims]
        if repeated := sorted({dim for dim in dims if dims.count(dim) > 1 or dim in FIXED}):
            raise ValueError(f"reward dimensions {repeated} would share a column with another")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise ValueError(f"shard is {self.shard[0]}/{self.shard[1]}; i/n needs 0 <= i < n")

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the scores; batch size and processes do not."""
        return {
            **self.origin,
            "identity": self.dataset.identity(),
            "schema": self.dataset.schema.name,
            "limit": self.limit,
            "max_frames": self.max_frames,
            "records_per_part": RECORDS_PER_PART,
        }

    def check_folder(self) -> None:
        """Raise ValueError if the folder holds results of other settings."""
        compare_settings(self.folder / MANIFEST, self.settings(), MAKER)

    def load(self) -> None:
        """Load the models, after `check_folder`, and record the settings."""
        self.check_folder()
        for model in self.models:
            load(model)
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.settings() | {"fingerprint": join_fingerprints(self.models)}
        record_settings(self.folder / MANIFEST, settings, MAKER)

    @property
    def parts(self) -> PartFiles:
        """Return the saved blocks."""
        return PartFiles(self.folder / "parts")

    def tally(self, progress: Progress, blocks: Sequence[int]) -> None:
        """Add the rows of saved blocks; raise TooManyFailures if too many failed so far."""
        for row in self.parts.rows(blocks):
            progress.stats.add(row)
        try:
            progress.stats.check(self.max_failed_fraction, ROWS_BEFORE_CHECK)
        except TooManyFailures:
            if self.shard[1] == 1:
                write_summary(self, progress.stats, {"status": "stopped", **progress.speed()})
            raise

    def owns(self, block: int) -> bool:
        """Return whether a block belongs to this shard."""
        return block % self.shard[1] == self.shard[0]

    def share(self) -> int | None:
        """Return the number of records of this shard; None if counting them is slow."""
        if (size := self.dataset.size()) is None:
            return None
        size = min(size, self.limit or size)
        (i, n), part = self.shard, RECORDS_PER_PART
        return sum(min(part, size - start) for start in range(i * part, size, n * part))


def run(job: ScoringJob, progress: Progress) -> list[int]:
    """Load the models, and score the missing blocks; return the blocks of the whole dataset.

    Records of saved blocks are scored again if they failed for a reason that may pass.

    Raises:
        TooManyFailures: Too many rows failed so far; this is checked after every block.
    """
    job.load()
    job = replace(job, models=[CheckedReward(model) for model in job.models])
    parts = job.parts
    drop_changed(job, parts)
    blocks: list[int] = []
    stamps: dict[int, list[str]] = {}

    def missing() -> Iterator[tuple[int, int, Record]]:
        for block, records in list_blocks(job):
            blocks.append(block)
            if job.owns(block) and (todo := parts.select(block, records)):
                stamps[block] = [record.stamp() for _, record in records]
                yield from ((block, i, record) for i, record in todo)

    job.tally(progress, parts.complete(filter(job.owns, parts.blocks())))
    for block, rows in score_blocks(job, missing(), progress):
        parts.write(block, rows, stamps.pop(block))
        job.tally(progress, [block])
        progress.show()
    return blocks


def drop_changed(job: ScoringJob, parts: PartFiles) -> None:
    """Delete the blocks of this shard with records that changed since they were scored."""
    saved = set(filter(job.owns, parts.blocks()))
    changed, last = 0, max(saved, default=-1)
    for block, records in itertools.islice(list_blocks(job), last + 1):
        if block in saved:
            changed += parts.drop_changed(block, [record.stamp() for _, record in records])
    if changed:
        say(f"{changed} rows changed since they were scored: scoring them again")


def finish(
    job: ScoringJob,
    blocks: Sequence[int],
    kind: str,
    speed: Mapping[str, float] | None = None,
    prefix: str | None = None,
) -> RunningStats:
    """Merge all parts into `scores.<kind>`, and write the summary and the page; return the counts.

    With a `prefix`, the means of every prompt are written as well, see `average_prompts`.
    """
    stats = RunningStats()
    for row in job.parts.rows(blocks):
        stats.add(row)
    merge(job.parts, blocks, job.folder / f"scores.{kind}")
    write_summary(job, stats, {"status": "complete", **(speed or {})})
    write_page(job.folder, job.dataset, stats)
    if prefix is not None:
        write_rows(job.folder / PROMPTS, average_prompts(job.parts.rows(blocks), prefix))
    return stats


def write_summary(job: ScoringJob, stats: RunningStats, about: Mapping[str, Any]) -> None:
    """Write `summary.json`."""
    manifest = job.folder / MANIFEST
    known = read_object(manifest) if manifest.exists() else {}
    text = json.dumps({**known, **about, **stats.summary()}, indent=2, ensure_ascii=False)
    write_text(job.folder / "summary.json", text + "\n")


def list_blocks(job: ScoringJob) -> Iterator[tuple[int, list[tuple[int, Record]]]]:
    """Yield each block's number, and its records with theirs."""
    numbered = enumerate(itertools.islice(iter(job.dataset), job.limit))
    for block in itertools.count():
        part = list(itertools.islice(numbered, RECORDS_PER_PART))
        if not part:
            return
        yield block, part


def score_blocks(
    job: ScoringJob, todo: Iterator[tuple[int, int, Record]], progress: Progress
) -> Iterator[tuple[int, list[dict[str, Column]]]]:
    """Yield the rows of every block, in order, while the next block is decoded and scored."""
    decoders = ThreadPoolExecutor(job.workers, "decode")
    scorer = ThreadPoolExecutor(1, "score")
    waiting: deque[tuple[int, _ScoreBlock]] = deque()
    try:
        items = _decode_ahead(job, decoders, todo)
        for number, of_block in itertools.groupby(items, lambda found: found[0]):
            block = _ScoreBlock(job, scorer, progress)
            waiting.append((number, block))
            for _, item in of_block:
                block.add(item)
            block.flush()
            if len(waiting) > 1:
                number, block = waiting.popleft()
                yield number, block.result()
        while waiting:
            number, block = waiting.popleft()
            yield number, block.result()
    finally:
        decoders.shutdown(cancel_futures=True)
        scorer.shutdown(cancel_futures=True)


def _decode_ahead(
    job: ScoringJob, decoders: ThreadPoolExecutor, todo: Iterator[tuple[int, int, Record]]
) -> Iterator[tuple[int, DecodedMedium]]:
    """Yield items in order; decode ahead for one batch, within the memory limit."""
    pending: deque[tuple[int, Future[DecodedMedium]]] = deque()
    depth = largest = 0
    options = job.max_frames, any("sound" in model.spec.needs for model in job.models)
    for block, index, record in todo:
        for medium in range(max(len(record.media), 1)):
            pending.append((block, decoders.submit(prepare, record, index, medium, *options)))
            while len(pending) > max(depth, job.workers):
                first, future = pending.popleft()
                largest = max(largest, future.result().size, 1)
                depth = min(job.batch_size + 2 * job.workers, _MEMORY // largest)
                yield first, future.result()
    while pending:
        block, future = pending.popleft()
        yield block, future.result()


class _ScoreBlock:
    """Batches of one block, grouped by shape, with the resulting rows."""

    def __init__(self, job: ScoringJob, scorer: ThreadPoolExecutor, progress: Progress):
        self._job, self._scorer, self._progress = job, scorer, progress
        self._whole = any("groups" in model.spec.needs for model in job.models)
        self._buckets: dict[tuple[Any, ...], list[DecodedMedium]] = {}
        self._sent: deque[tuple[Sequence[DecodedMedium], Future]] = deque()
        self._rows: dict[tuple[int, int], dict[str, Column]] = {}  # in the order of the dataset
        self._held = 0

    def add(self, item: DecodedMedium) -> None:
        """Add an item; batches that become full are sent to the models."""
        self._rows[item.index, item.medium] = {}
        if item.clip is None:
            self._rows[item.index, item.medium] = make_unscored_row(self._job.models, item)
        else:
            shape = (*item.clip.pixels.shape, item.clip.fps is None)
            self._buckets.setdefault(shape, []).append(item)
            self._held += item.size
        if not self._whole or item.medium + 1 >= len(item.record.media):
            self._send_full()

    def flush(self) -> None:
        """Send the remaining batches, full or not."""
        for shape in list(self._buckets):
            self._send(shape)

    def result(self) -> list[dict[str, Column]]:
        """Wait for the last batch; return the rows, in the order of the dataset."""
        while self._sent:
            self._collect()
        return list(self._rows.values())

    def _send_full(self) -> None:
        for shape, bucket in list(self._buckets.items()):
            if len(bucket) >= self._job.batch_size or bucket[0].size * len(bucket) > _BATCH_BYTES:
                self._send(shape)
        while self._held > _MEMORY:
            self._send(max(self._buckets, key=lambda shape: math.prod(shape[:4])))

    def _send(self, shape: tuple[Any, ...]) -> None:
        while len(self._sent) >= _BATCHES_AHEAD:
            self._collect()
        items = self._buckets.pop(shape)
        self._held -= sum(item.size for item in items)
        self._sent.append((items, self._scorer.submit(self._score, items)))

    def _score(self, items: Sequence[DecodedMedium]) -> list[dict[str, Column]]:
        batch, start = assemble(items), time.perf_counter()
        rows = score(self._job.models, items, batch, self._job.folder)
        self._progress.in_model += time.perf_counter() - start
        self._progress.rows += len(rows)
        return rows

    def _collect(self) -> None:
        items, rows = self._sent.popleft()
        places = [(item.index, item.medium) for item in items]
        self._rows |= zip(places, rows.result(), strict=True)

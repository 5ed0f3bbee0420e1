"""Run a scoring job: decode ahead, batch by shape, score, save in parts, and resume."""

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowalign.curation.scoring.part_files import FIXED, PartFiles, RunningStats, Throughput, merge
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
from flowalign.types.ranges import PositiveInt, UnitInterval, require_ranges
from flowalign.utils.console import say
from flowalign.utils.files import read_object, write_text
from flowalign.utils.folders import compare_settings, record_settings

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
            "identity": self.dataset.identity(),
            "schema": self.dataset.schema.name,
            "limit": self.limit,
            "max_frames": self.max_frames,
            "records_per_part": RECORDS_PER_PART,
        }

    def load(self, settings: Mapping[str, Any]) -> None:
        """Load the models, after a check that the folder holds no results of other settings."""
        manifest = self.folder / MANIFEST
        compare_settings(manifest, settings, MAKER)
        for model in self.models:
            load(model)
        known = {"fingerprint": join_fingerprints(self.models)}
        record_settings(manifest, {**settings, **known}, MAKER)

    @property
    def parts(self) -> PartFiles:
        """Return the saved blocks."""
        return PartFiles(self.folder / "parts")

    def tally(self, stats: RunningStats, blocks: Sequence[int]) -> None:
        """Add the rows of saved blocks; raise TooManyFailures if too many failed so far."""
        for row in self.parts.rows(blocks):
            stats.add(row)
        stats.check(self.max_failed_fraction, ROWS_BEFORE_CHECK)

    def share(self) -> int | None:
        """Return the number of records of this shard; None if counting them is slow."""
        if (size := self.dataset.size()) is None:
            return None
        size = min(size, self.limit or size)
        (i, n), part = self.shard, RECORDS_PER_PART
        return sum(min(part, size - start) for start in range(i * part, size, n * part))


Watch = Callable[[RunningStats, Throughput], None]


def run(job: ScoringJob, watch: Watch, speed: Throughput) -> list[int]:
    """Score the missing blocks of this shard; return the blocks of the whole dataset.

    Records of saved blocks are scored again if they failed for a reason that may pass.

    Raises:
        TooManyFailures: Too many rows failed so far; this is checked after every block.
    """
    job = replace(job, models=[CheckedReward(model) for model in job.models])
    parts, stats = job.parts, RunningStats()
    drop_changed(job, parts)
    blocks: list[int] = []
    stamps: dict[int, list[str]] = {}

    def missing() -> Iterator[tuple[int, int, Record]]:
        for block, records in list_blocks(job):
            blocks.append(block)
            if block % job.shard[1] == job.shard[0] and (todo := parts.select(block, records)):
                stamps[block] = [record.stamp() for _, record in records]
                yield from ((block, i, record) for i, record in todo)

    mine = (b for b in parts.blocks() if b % job.shard[1] == job.shard[0])
    job.tally(stats, parts.complete(mine))
    for block, rows in score_blocks(job, missing(), speed):
        parts.write(block, rows, stamps.pop(block))
        job.tally(stats, [block])
        watch(stats, speed)
    return blocks


def drop_changed(job: ScoringJob, parts: PartFiles) -> None:
    """Delete the blocks of this shard with records that changed since they were scored."""
    saved = {block for block in parts.blocks() if block % job.shard[1] == job.shard[0]}
    changed, last = 0, max(saved, default=-1)
    for block, records in itertools.islice(list_blocks(job), last + 1):
        if block in saved:
            changed += parts.drop_changed(block, [record.stamp() for _, record in records])
    if changed:
        say(f"{changed} rows changed since they were scored: scoring them again")


def finish(
    folder: Path, blocks: Sequence[int], kind: str, about: Mapping[str, Any]
) -> RunningStats:
    """Merge all parts into `scores.<kind>`, and write `summary.json`; return the statistics."""
    parts, stats = PartFiles(folder / "parts"), RunningStats()
    for row in parts.rows(blocks):
        stats.add(row)
    merge(parts, blocks, folder / f"scores.{kind}")
    write_summary(folder, stats, {"status": "complete", **about})
    return stats


def write_summary(folder: Path, stats: RunningStats, about: Mapping[str, Any]) -> None:
    """Write `summary.json`."""
    known = read_object(folder / MANIFEST) if (folder / MANIFEST).exists() else {}
    text = json.dumps({**known, **about, **stats.summary()}, indent=2, ensure_ascii=False)
    write_text(folder / "summary.json", text + "\n")


def list_blocks(job: ScoringJob) -> Iterator[tuple[int, list[tuple[int, Record]]]]:
    """Yield each block's number, and its records with theirs."""
    numbered = enumerate(itertools.islice(iter(job.dataset), job.limit))
    for block in itertools.count():
        part = list(itertools.islice(numbered, RECORDS_PER_PART))
        if not part:
            return
        yield block, part


def score_blocks(
    job: ScoringJob, todo: Iterator[tuple[int, int, Record]], speed: Throughput
) -> Iterator[tuple[int, list[dict[str, Column]]]]:
    """Yield the rows of every block, in order, while the next block is decoded and scored."""
    decoders = ThreadPoolExecutor(job.workers, "decode")
    scorer = ThreadPoolExecutor(1, "score")
    waiting: deque[_ScoreBlock] = deque()
    try:
        items = _decode_ahead(job, decoders, todo)
        for block, of_block in itertools.groupby(items, lambda found: found[0]):
            waiting.append(_ScoreBlock(job, block, scorer, speed))
            for _, item in of_block:
                waiting[-1].add(item)
            waiting[-1].flush()
            if len(waiting) > 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
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
            future = decoders.submit(prepare, record, index, medium, *options)
            pending.append((block, future))
            while len(pending) > max(depth, job.workers):
                yield (found := _wait_for(pending.popleft()))
                largest = max(largest, found[1].size, 1)
                depth = min(job.batch_size + 2 * job.workers, _MEMORY // largest)
    while pending:
        yield _wait_for(pending.popleft())


def _wait_for(entry: tuple[int, Future[DecodedMedium]]) -> tuple[int, DecodedMedium]:
    return entry[0], entry[1].result()


class _ScoreBlock:
    """Batches of one block, grouped by shape, with the resulting rows."""

    def __init__(self, job: ScoringJob, number: int, scorer: ThreadPoolExecutor, speed: Throughput):
        self.number, self._job, self._scorer, self._speed = number, job, scorer, speed
        self._whole = any("groups" in model.spec.needs for model in job.models)
        self._buckets: dict[tuple[Any, ...], list[DecodedMedium]] = {}
        self._futures: deque[Future[list[dict[str, Column]]]] = deque()
        self._rows: dict[tuple[int, int], dict[str, Column]] = {}
        self._order: list[tuple[int, int]] = []
        self._items: deque[Sequence[DecodedMedium]] = deque()
        self._held = 0

    def add(self, item: DecodedMedium) -> None:
        """Add an item; batches that become full are sent to the models."""
        place = (item.index, item.medium)
        self._order.append(place)
        if item.clip is None:
            self._rows[place] = make_unscored_row(self._job.models, item)
        else:
            shape = (*item.clip.pixels.shape, item.clip.fps is None)
            self._buckets.setdefault(shape, []).append(item)
            self._held += item.size
        if not self._whole or item.medium + 1 >= len(item.record.media):
            self._send_full()

    def flush(self) -> None:
        """Send the remaining batches, full or not."""
        for shape in list(self._buckets):
            self._send(self._buckets.pop(shape))

    def result(self) -> tuple[int, list[dict[str, Column]]]:
        """Wait for the last batch; return number and rows, in the order of the dataset."""
        while self._futures:
            self._collect()
        return self.number, [self._rows[place] for place in self._order]

    def _send_full(self) -> None:
        for shape, bucket in list(self._buckets.items()):
            if len(bucket) >= self._job.batch_size or bucket[0].size * len(bucket) > _BATCH_BYTES:
                self._send(self._buckets.pop(shape))
        while self._held > _MEMORY:
            largest = max(self._buckets, key=lambda shape: math.prod(shape[:4]))
            self._send(self._buckets.pop(largest))

    def _send(self, items: Sequence[DecodedMedium]) -> None:
        while len(self._futures) >= _BATCHES_AHEAD:
            self._collect()
        self._held -= sum(item.size for item in items)
        self._items.append(items)
        self._futures.append(self._scorer.submit(self._score, items))

    def _score(self, items: Sequence[DecodedMedium]) -> list[dict[str, Column]]:
        batch, start = assemble(items), time.perf_counter()
        rows = score(self._job.models, items, batch, self._job.folder)
        self._speed.in_model += time.perf_counter() - start
        self._speed.rows += len(rows)
        return rows

    def _collect(self) -> None:
        places = [(item.index, item.medium) for item in self._items.popleft()]
        self._rows |= zip(places, self._futures.popleft().result(), strict=True)

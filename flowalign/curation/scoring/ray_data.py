"""Score the blocks of a job on the workers of a Ray cluster, with Ray Data.

A worker holds the models and saves each block that it has scored, like a process on this machine.
If a worker is lost, another one scores its block.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowalign.curation.scoring.scoring_job import (
    ScoringJob,
    drop_changed,
    list_blocks,
    score_blocks,
)
from flowalign.curation.scoring.stats import Progress
from flowalign.data.media_record import Record
from flowalign.rewards.checked import CheckedReward, RewardFailure
from flowalign.utils.console import say
from flowalign.utils.ray_cluster import check_cores, connect

RESTARTS = 3
"""Number of restarts of a worker that died. They limit the repetitions of its block: Ray would also
count calls of a lost machine that it has not yet missed."""
SECONDS_BETWEEN_LOOKS = 5
"""Seconds between checks of the number of cores in the cluster."""


@dataclass(frozen=True)
class ScoringCluster:
    """Ray cluster, and the number of workers that score there."""

    workers: int
    """Number of workers. Each has one core and, if there are GPUs, one GPU or a share of one."""
    address: str | None
    """Address of a running cluster. None: a new cluster on this machine for this job, which only
    this machine can reach."""
    open_job: Callable[[], ScoringJob]
    """Function that returns the job on a worker."""

    def run(self, job: ScoringJob, progress: Progress) -> Sequence[int]:
        """Score the missing blocks; return the blocks of the whole dataset.

        The folder of the job must be on storage that all workers share.

        Raises:
            TooManyFailures: Too many rows failed so far; this is checked after every block.
            RewardFailure: A model is wrong, or workers died too often.
            ValueError: A worker cannot use the options or the data.
        """
        job.check_folder()
        parts = job.parts
        blocks = [block for block, _ in list_blocks(job)]  # reads records, but decodes nothing
        drop_changed(job, parts)
        complete = parts.complete(blocks)
        job.tally(progress, complete)
        known = progress.stats.rows
        if not (missing := sorted(set(blocks) - set(complete))):
            return blocks
        with connect(self.workers, self.address):
            for block in self._score_blocks(missing):
                if block not in parts:
                    raise ValueError(f"{job.folder} must be a folder that all workers share")
                job.tally(progress, [block])
                progress.rows = progress.stats.rows - known
                progress.show()
        return blocks

    def _score_blocks(self, blocks: Sequence[int]) -> Iterator[int]:
        """Yield blocks as they are scored and saved."""
        import ray
        from ray.exceptions import RayError

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        gpus = check_cores(self.workers)
        rows = ray.data.from_items(list(blocks), override_num_blocks=len(blocks)).map_batches(
            _Worker,
            fn_constructor_args=(self.open_job, str(Path.cwd())),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=self.workers),
            num_cpus=1,
            num_gpus=1 / math.ceil(self.workers / gpus) if gpus else 0.0,
            max_restarts=RESTARTS,
            max_task_retries=-1,
        )
        try:
            with self._watch_machines():
                for row in rows.iter_rows():
                    if row["wrong"]:
                        raise ValueError(row["wrong"])
                    if row["failed"]:
                        raise RewardFailure(row["failed"])
                    yield int(row["block"])
        except RayError as error:
            why = str(error).strip().splitlines()[-1]
            raise RewardFailure(f"a worker died more than {RESTARTS} times: {why}") from error

    @contextmanager
    def _watch_machines(self) -> Iterator[None]:
        """Print a message if machines leave and blocks wait for new ones."""
        import ray

        ended = threading.Event()

        def watch() -> None:
            enough = True
            while not ended.wait(SECONDS_BETWEEN_LOOKS):
                before, cores = enough, ray.cluster_resources().get("CPU", 0)
                enough = cores >= self.workers
                if before and not enough:
                    say(
                        f"a machine left the cluster, which has {cores:g} cores for "
                        f"{self.workers} workers: waiting for another; to continue at once, stop "
                        f"this command and repeat it with --processes {cores:g}"
                    )

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


class BlockScorer:
    """Scorer of single blocks of a job, fastest in ascending order."""

    def __init__(self, job: ScoringJob):
        job.load()
        self.job = replace(job, models=[CheckedReward(model) for model in job.models])
        self.parts, self._next = job.parts, 0
        self._blocks = list_blocks(job)

    def score(self, block: int) -> None:
        """Score the records of a block that `PartFiles.select` returns, and save its rows."""
        records = self._records(block)
        stamps = [record.stamp() for _, record in records]
        records = self.parts.select(block, records)
        todo = ((block, i, record) for i, record in records)
        for number, rows in score_blocks(self.job, todo, Progress()):
            self.parts.write(number, rows, stamps)

    def _records(self, block: int) -> list[tuple[int, Record]]:
        """Return the records of a block, reading forward to it or again from the beginning."""
        if block < self._next:
            self._blocks = list_blocks(self.job)
        number, records = next(found for found in self._blocks if found[0] == block)
        self._next = number + 1
        return records


class _Worker:
    """Worker that scores blocks; it loads the models for the first one."""

    def __init__(self, open_job: Callable[[], ScoringJob], folder: str):
        os.chdir(folder)  # so that relative paths resolve as in the driver
        self.open_job, self.scorer = open_job, None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Score one block; return errors as values, so users see them without Ray's traces."""
        (block,), wrong, failed = batch["item"].tolist(), "", ""
        try:
            self.scorer = self.scorer or BlockScorer(self.open_job())
            self.scorer.score(block)
        except ValueError as error:
            wrong = str(error)
        except (RewardFailure, OSError) as error:
            failed = str(error)
        return {"block": [block], "wrong": [wrong], "failed": [failed]}

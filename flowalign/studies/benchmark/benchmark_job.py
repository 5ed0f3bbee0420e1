"""Sample and score the items of a benchmark, block by block."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from flowalign.rewards.composite import Rewards
from flowalign.runs.sampling_job import SamplingJob
from flowalign.studies.benchmark.card import Card
from flowalign.studies.benchmark.items import BenchmarkItem, ModelFolder, Place, split_blocks
from flowalign.types import Request
from flowalign.utils.console import Progress
from flowalign.utils.folders import record_settings
from flowalign.utils.media.decode import decode
from flowalign.utils.media.encode import write_clip, write_picture
from flowalign.utils.media.media import Media
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
class Deviation:
    """Setting that differs from the card, or that the card leaves open."""

    setting: str
    """Name of the setting."""
    card: str
    """Value of the card; `not fixed` if the authors leave it open."""
    here: str
    """Value of this evaluation."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkJob:
    """Protocol, models, prompts and settings of one benchmark."""

    card: Card
    """Protocol."""
    sampler: SamplingJob
    """Run file, requests, steps, seed and copies; its weights are not used."""
    rewards: Rewards | None
    """Scorers. None: the official tool scores the images."""
    models: Sequence[BenchmarkModel]
    """Models, the base first."""
    settings: Mapping[str, Any]
    """Settings that determine images and scores, equal for all models."""
    deviations: Sequence[Deviation]
    """Settings that differ from the card."""
    left_open: Sequence[Deviation]
    """Settings that the card leaves open."""
    shard: tuple[int, int] = (0, 1)
    """Index and number of shards. A shard takes every n-th block."""
    scores: Sequence[str] | None = None
    """Files with the scores of an official tool. None: the job scores the images."""

    @cached_property
    def blocks(self) -> list[list[Place]]:
        """Return the items in blocks."""
        one = self.sampler
        return split_blocks(len(one.requests), one.count, one.micro_batch)

    def folder(self, model: BenchmarkModel) -> ModelFolder:
        """Return the files of a model."""
        text = json.dumps({**self.settings, "weights": model.digest}, sort_keys=True)
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
        todo = [(model, block) for model in self.models for block in self._find_unfinished(model)]
        if not todo:
            return 0
        made, start, loaded = 0, time.perf_counter(), None
        self.sampler.load()
        if self.rewards:
            self.rewards.load()
        with Progress(len(todo), console=Console(stderr=True)) as progress:
            for done, (model, block) in enumerate(todo):
                if model.weights and model != loaded:
                    self.sampler.run.policy.load_weights(model.weights)
                    loaded = model
                made += self._complete(self.folder(model), block)
                progress.update(done, {"throughput": made / (time.perf_counter() - start)})
        return made

    def _find_unfinished(self, model: BenchmarkModel) -> list[int]:
        """Return the blocks of this shard that lack images or scores."""
        i, n = self.shard
        folder, dims = self.folder(model), self.card.dims if self.rewards else ()
        blocks = range(i, len(self.blocks), n)
        return [k for k in blocks if not folder.is_done(k, self.blocks[k], dims)]

    def _complete(self, folder: ModelFolder, block: int) -> int:
        """Make the missing images of a block, then score its files; return the number made."""
        places, one = self.blocks[block], self.sampler
        requests = [one.requests[place.row] for place in places]
        absent = [place for place in places if not folder.media(place).is_file()]
        if absent:
            seeds = [generator(one.seed, "benchmark", *place) for place in places]
            for place, frames in zip(places, one.media(requests, seeds), strict=True):
                if place in absent:
                    _write(folder.media(place), frames, one.fps)
        folder.write(block, self._score(folder, places, requests))
        return len(absent)

    def _score(
        self, folder: ModelFolder, places: Sequence[Place], requests: Sequence[Request]
    ) -> list[BenchmarkItem]:
        """Return the items with the scores of their files."""
        if self.rewards is None:
            return [BenchmarkItem(*place, {}) for place in places]
        files = [Media(str(folder.media(place))) for place in places]
        media = torch.stack([decode(file).pixels.float() / 255 for file in files])
        output = self.rewards.score(self.rewards.batch(media, requests, (), self.sampler.fps))
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

"""Examples of a dataset on disk, encoded once and kept."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from typing_extensions import override

from flowalign.data.latents.encode_once import Intake, Latents, Texts
from flowalign.data.preference.attributes import read_attributes
from flowalign.data.preference.collate import Builder, Columns
from flowalign.data.preference.convert import Keep, read_pairs, read_samples
from flowalign.data.preference.dropped import Tally
from flowalign.data.preference.pairs import Pair, Sample
from flowalign.data.preference.prefetch import prefetched
from flowalign.data.preference.sampler import Order
from flowalign.data.preference.weighting import GapWeights
from flowalign.distributed.processes import Processes
from flowalign.media.media import Media
from flowalign.rewards.composite import Rewards
from flowalign.sampling.rollout import DTYPES
from flowalign.training.learner import Learner
from flowalign.training.matching.source import NOTHING, Batch, Source, Stream
from flowalign.training.reference import conditional
from flowalign.types import Examples, Known, Policy
from flowalign.utils.seeds import generator

Unit = Pair | Sample
Kind = Literal["pairs", "samples", "attributes"]
_AHEAD = 2
_LONGEST_LINE = 300


@dataclass(frozen=True, kw_only=True)
class Stored(Source):
    """Pairs, or samples with labels, of any dataset that `flowalign score` reads, or of pairs."""

    path: str
    """A file, or a folder of parquet files."""
    kind: Kind = "pairs"
    """attributes: media with texts `positive` and `negative`, for a recipe with an expert."""
    held_out: str | None = None
    """Pairs, also beside samples, that are never trained on; how often the policy agrees with them
    is evaluated."""
    schema: str = "auto"
    root: str | None = None
    """Where relative paths begin; null: beside the file."""
    dimensions: Sequence[str] = ()
    """Only preferences in these; none: all there are."""
    batch_size: int = 64
    """Pairs or samples of a step, over all processes."""
    cache: str | None = None
    """Folder of latents and prompt embeddings, shared by runs; null: in memory."""
    cache_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_frames: int | None = None
    """Of a video at most so many, evenly spaced, whatever its rate; null: the first at the policy's
    rate, as many as it makes."""
    mixed_shapes: bool = False
    """Also pairs whose media differ in size or frames: both are cropped to the policy's size."""
    flip: float = 0.0
    """Probability that a pair is mirrored, both of its media; wrong where prompts say left."""
    prompt_dropout: float = 0.0
    """Probability that a pair is shown without its prompt; keeps guidance working."""
    user_dropout: float = 0.0
    """Probability that a policy that answers to users is not told whose judgement it is (PPD)."""
    weighting: GapWeights | None = None
    stage_steps: int = 0
    """A curriculum: pairs of stage k join after k times so many steps. 0: all from the start."""
    held_out_pairs: int = 256
    """At most so many are evaluated."""
    max_dropped_fraction: float = 0.05
    """Of pairs or samples; more unusable ones end the run before it begins. What a dataset holds by
    design, such as ties and repeated pairs, is left out and told, and does not count."""

    def __post_init__(self) -> None:
        """Refuse numbers that no batch can have."""
        for name in ("batch_size", "held_out_pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("flip", "prompt_dropout", "user_dropout", "max_dropped_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be in [0, 1]")
        if self.stage_steps < 0:
            raise ValueError(f"data.stage_steps is {self.stage_steps}; it must be at least 0")
        if not self.paired and (self.weighting or self.stage_steps):
            raise ValueError(
                "data.weighting and data.stage_steps are of pairs; data.kind is samples"
            )

    @property
    @override
    def paired(self) -> bool:
        """As its kind says; a medium with attributes is compared with itself."""
        return self.kind != "samples"

    @property
    @override
    def knows(self) -> Set[Known]:
        """Pairs may have all there is."""
        return {"labels", "segments", "masks"} if self.kind == "pairs" else {"labels"}

    @property
    @override
    def needs_expert(self) -> bool:
        """For attributes."""
        return self.kind == "attributes"

    @property
    @override
    def units_per_step(self) -> int:
        """The batch size."""
        return self.batch_size

    @property
    @override
    def prompt_files(self) -> list[str]:
        """None are."""
        return []

    @override
    def check(self, rewards: Rewards) -> None:
        """Raise ValueError where there is no such file."""
        for path in (self.path, self.held_out):
            if path is not None and not Path(path).exists():
                raise ValueError(f"data: {path!r} does not exist (looked in {Path.cwd()})")

    @override
    def plan(self, evaluations_per_velocity: int, num_rewards: int) -> dict[str, str]:
        """Nothing is sampled or scored."""
        return {f"{self.kind} per step": str(self.batch_size)}

    @override
    def open(
        self, learner: Learner, rewards: Rewards, seed: int, processes: Processes,
        needs: Set[Known] = NOTHING,
    ) -> "StoredStream":  # fmt: skip
        """Read, validate and encode everything. ValueError if too many rows cannot be used."""
        return StoredStream(self, learner, seed, processes, needs)

    def read(
        self, path: str, kind: Kind, needs: Set[Known], keep: Keep
    ) -> tuple[list[Unit], Tally]:
        """The pairs or samples of a file, and what was dropped of it."""
        if kind == "samples":
            labelled = "labels" in needs
            samples, tally = read_samples(
                path, self.schema, self.root, self.dimensions, labelled, keep
            )
            return list(samples), tally
        if kind == "attributes":
            pairs, tally = read_attributes(path, self.schema, self.root, keep)
            return list(pairs), tally
        pairs, tally = read_pairs(
            path, self.schema, self.root, self.dimensions, self.mixed_shapes, keep
        )
        return list(pairs), tally


class StoredStream(Stream):
    """Batches of a dataset that has been read and encoded."""

    def __init__(
        self, cfg: Stored, learner: Learner, seed: int, processes: Processes, needs: Set[Known]
    ):
        self.cfg, self.learner, self.seed, self.processes = cfg, learner, seed, processes
        folder = Path(cfg.cache) if cfg.cache else None
        self.latents = Latents(
            learner.policy, folder, DTYPES[cfg.cache_dtype], cfg.max_frames, processes=processes
        )
        unguided = conditional(learner.policy)  # as the networks are matched
        assert isinstance(unguided, Policy)
        self.texts = Texts(unguided, folder, processes=processes)
        self.units = self._prepared(cfg.path, cfg.kind, needs)
        blank = sum(isinstance(unit, Sample) and unit.desirable is None for unit in self.units)
        if blank:
            learner.notes.append(f"{blank} of {len(self.units)} samples have no label: desirable")
        if cfg.weighting:
            self.units = cfg.weighting.weighted([u for u in self.units if isinstance(u, Pair)])
        self.order = Order(seed, [self._available(unit) for unit in self.units])
        compared: Kind = "pairs" if cfg.kind == "samples" else cfg.kind
        shown = self._prepared(cfg.held_out, compared, needs) if cfg.held_out else []
        columns = Columns.of(self.units)
        columns.check(needs, cfg.path)
        self.builder = Builder(self.latents, self.texts, columns)
        self.shown_builder = Builder(self.latents, self.texts, Columns.of(shown))
        self.shown = processes.share(shown[: cfg.held_out_pairs])
        if folder:
            learner.notes.append(self._effort())

    @override
    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Built ahead by one thread while the policy learns from the one before."""
        for batch, waited in prefetched(self._batch, steps, _AHEAD):
            yield replace(batch, metrics={"timing/waited": waited})

    @override
    def held_out(self) -> Examples | None:
        """Without mirrors or dropout."""
        return self.shown_builder.build(self.shown) if self.shown else None

    def _batch(self, step: int) -> Batch:
        places = self.order.batch(step, self.cfg.batch_size)
        mine = self.processes.share(range(len(places)))
        units = [self.units[places[i]] for i in mine]
        chances = self.cfg.flip, self.cfg.prompt_dropout, self.cfg.user_dropout
        draws = torch.rand(
            len(chances), len(places), generator=generator(self.seed, "augment", step)
        )
        coins = (draws < torch.tensor(chances)[:, None])[:, mine[0] : mine[0] + len(mine)].tolist()
        examples = self.builder.build(units, *coins)
        return Batch(examples, mine[0], len(places))

    def _available(self, unit: Unit) -> int:
        """The step from which a pair of a curriculum is used."""
        return unit.stage * self.cfg.stage_steps if isinstance(unit, Pair) else 0

    def _prepared(self, path: str, kind: Kind, needs: Set[Known]) -> list[Unit]:
        """Read, encode, and drop what cannot be encoded."""
        intake = Intake(self.latents, self.cfg.flip > 0)
        units, tally = self.cfg.read(path, kind, needs, intake.take)
        intake.finish()
        self.texts.prepare(["", *sorted({text for unit in units for text in texts_of(unit)})])
        kept = []
        for unit in units:
            why = [intake.failed[m] for m in media_of(unit) if m in intake.failed]
            tally.add(why[0]) if why else kept.append(unit)
        self._judge(f"{kind} of {path}", len(kept), tally)
        return kept

    def _effort(self) -> str:
        """What the cache has saved."""
        found = {"latents": self.latents, "prompts": self.texts}
        now = {name: float(part.num_encoded) for name, part in found.items()}
        now["stored"] = float(self.latents.num_stored)
        now["damaged"] = float(sum(part.store.num_damaged for part in found.values()))
        now = {name: int(count) for name, count in self.processes.total(now).items()}
        said = [
            f"{now[name] + part.store.num_found:,} {name}: {now[name]:,} encoded now, "
            f"{part.store.num_found:,} known"
            for name, part in found.items()
        ]
        if now["stored"]:
            said.append(f"latents that the dataset holds: {now['stored']:,}")
        if now["damaged"]:
            said.append(f"damaged files of the cache, deleted: {now['damaged']:,}")
        return "; ".join(said)

    def _judge(self, what: str, kept: int, tally: Tally) -> None:
        """Say what was dropped; stop where it is too much."""
        lines = [line[:_LONGEST_LINE] for line in tally.lines()]
        total, unusable = tally.total, tally.unusable
        head = f"{total} of the {kept + total} {what} are left out, {unusable} of them unusable"
        if not kept or unusable > self.cfg.max_dropped_fraction * (kept + unusable):
            limit = f"data.max_dropped_fraction is {self.cfg.max_dropped_fraction:g}"
            raise ValueError("\n".join([f"{head}; {limit}", *lines[:4]]))
        if lines:
            self.learner.notes.append("\n".join([head, *lines]))


def media_of(unit: Unit) -> list[Media]:
    """Of a pair both."""
    return [unit.chosen.media, unit.rejected.media] if isinstance(unit, Pair) else [unit.media]


def texts_of(unit: Unit) -> list[str]:
    """All that is to be encoded as text."""
    return [unit.prompt, *((unit.targets or ()) if isinstance(unit, Pair) else ())]

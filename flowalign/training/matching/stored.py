"""Serve examples of a dataset on disk, encoded once and cached."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from typing_extensions import override

from flowalign.data.latents.encode_once import (
    EncodeQueue,
    LatentCache,
    PromptEmbeddingCache,
    cache_report,
)
from flowalign.data.preference.collate import BatchFields, Collator
from flowalign.data.preference.convert import drop_misfits
from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.pairs import (
    Example,
    Kind,
    Pair,
    Sample,
    collect_requests,
    condition_example,
    media_of,
)
from flowalign.data.preference.prefetch import prefetch
from flowalign.data.preference.sampler import EpochSampler
from flowalign.data.preference.weighting import GapWeights
from flowalign.distributed.processes import Processes
from flowalign.sampling.recording import DTYPES
from flowalign.training.learner import Learner
from flowalign.training.matching.source import (
    Batch,
    BatchStream,
    DataSource,
    StreamContext,
    refuse_teachers,
)
from flowalign.training.recipe import RecipePlan, RunContext
from flowalign.training.reference import conditional
from flowalign.types import Examples, Label, ModelPlan, Policy
from flowalign.types.ranges import NonNegativeInt, PositiveInt, UnitInterval, require_ranges
from flowalign.utils.seeds import generator

_AHEAD = 2
_LONGEST_LINE = 300


@dataclass(frozen=True, kw_only=True)
class StoredDataset(DataSource):
    """Configures pairs or labelled samples of a file that `flowalign score` reads, or of pairs."""

    path: str
    """Dataset: a file, or a folder of parquet files."""
    kind: Kind = "pairs"
    """pairs; samples with binary labels; attributes: media with texts `positive` and `negative`,
    which need a teacher; captions: samples of these with both texts, for that teacher."""
    held_out: str | None = None
    """File of pairs that are never trained on, on which the agreement of the policy is evaluated;
    it holds pairs even where `kind` is samples. Null: none."""
    schema: str = "auto"
    """Name of the reader of the dataset; auto: found from its columns."""
    root: str | None = None
    """Folder where relative paths begin. Null: beside the file."""
    dimensions: Sequence[str] = ()
    """Dimensions whose preferences are used. Empty: all."""
    batch_size: PositiveInt = 64
    """Pairs or samples of a step, over all processes."""
    cache: str | None = None
    """Folder of latents and prompt embeddings, shared by runs. Null: they stay in memory."""
    cache_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the cached latents."""
    max_frames: PositiveInt | None = None
    """Largest number of frames of a video, evenly spaced whatever its rate. Null: the policy's own
    number of frames at its rate, from the start."""
    mixed_shapes: bool = False
    """Whether to use pairs whose media differ in size or frames: both are cropped."""
    flip: UnitInterval = 0.0
    """Probability that both media of a pair are mirrored, in [0, 1]; wrong for prompts that say
    left or right."""
    prompt_dropout: UnitInterval = 0.0
    """Probability that a pair is shown without its prompt, in [0, 1]; keeps guidance working."""
    user_dropout: UnitInterval = 0.0
    """Probability that a personalised policy sees a pair without its user, in [0, 1] (PPD)."""
    weighting: GapWeights | None = None
    """Weights of pairs by the gap between their scores. Null: all weigh alike."""
    stage_steps: NonNegativeInt = 0
    """Steps of each stage of a curriculum: pairs of stage k are used after k stages. 0: all at
    once."""
    held_out_pairs: PositiveInt = 256
    """Largest number of held-out pairs that are evaluated."""
    max_dropped_fraction: UnitInterval = 0.05
    """Share of unusable pairs or samples above which the run ends before it begins. Rows that
    datasets hold by design, such as ties and repeated pairs, are reported and do not count."""

    def __post_init__(self) -> None:
        """Reject numbers that no batch can have."""
        require_ranges(self, "recipe.data")
        if not self.paired and (self.weighting or self.stage_steps):
            raise ValueError(
                "recipe.data.weighting and stage_steps are of pairs; recipe.data.kind is "
                f"{self.kind}"
            )

    @property
    def dataset(self) -> PreferenceDataset:
        """Return the data that are trained on."""
        return PreferenceDataset(
            path=self.path,
            kind=self.kind,
            schema=self.schema,
            root=self.root,
            dimensions=self.dimensions,
            mixed_shapes=self.mixed_shapes,
        )

    @property
    def held_out_dataset(self) -> PreferenceDataset | None:
        """Return the pairs that are never trained on."""
        kind = self.kind if self.paired else "pairs"
        return replace(self.dataset, path=self.held_out, kind=kind) if self.held_out else None

    @property
    @override
    def paired(self) -> bool:
        """Return False for samples only: a medium with attributes is compared with itself."""
        return self.kind in ("pairs", "attributes")

    @property
    @override
    def sampled_weights(self) -> None:
        return None

    @property
    @override
    def provides(self) -> Set[Label]:
        return {"labels", "segments", "masks"} if self.kind == "pairs" else {"labels"}

    @override
    def check_teachers(self, names: Sequence[str]) -> None:
        """Raise ValueError for pairs with a teacher, attributes without one, and several."""
        if self.kind == "pairs":
            refuse_teachers(names, "StoredDataset with kind pairs")
        elif len(names) > 1 or (self.kind == "attributes" and not names):
            raise ValueError(
                f"recipe.teachers names {len(names)} teachers; recipe.data.kind {self.kind} is "
                f"matched to {'one' if self.kind == 'attributes' else 'at most one'}, such as "
                "{expert: {path: CHECKPOINT}}"
            )

    @property
    @override
    def examples_per_step(self) -> int:
        return self.batch_size

    @property
    @override
    def prompt_files(self) -> list[str]:
        return []

    @override
    def check(self, run: RunContext) -> None:
        """Raise ValueError if a file does not exist, or an option would be ignored."""
        if self.held_out and not run.evaluates:
            raise ValueError(
                "recipe.data.held_out is read for evaluations, but evaluation is null: "
                "set evaluation, or recipe.data.held_out to null"
            )
        if self.user_dropout and run.policy.user_conditioning is None:
            raise ValueError(
                f"recipe.data.user_dropout is {self.user_dropout:g}, but the policy "
                f"{type(run.policy).__name__} is never told whose judgement a pair is"
            )
        run.policy.check_stored_media("recipe.data")
        for path in (self.path, self.held_out):
            if path is not None and not Path(path).exists():
                raise ValueError(f"recipe.data: {path!r} does not exist (looked in {Path.cwd()})")
        if run.conditioning:
            self.dataset.check_conditioning(run.conditioning, run.policy)

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        return RecipePlan(rows={f"{self.kind} per step": str(self.batch_size)})

    @override
    def open(self, learner: Learner, context: StreamContext) -> "StoredStream":
        """Read, validate and encode everything; raise ValueError if too many rows are unusable."""
        return StoredStream(self, learner.policy, learner.processes, context)


class StoredStream(BatchStream):
    """Serves batches of a dataset that has been read and encoded."""

    def __init__(
        self,
        cfg: StoredDataset,
        policy: Policy,
        processes: Processes,
        context: StreamContext,
    ):
        self.cfg, self.seed, self.processes = cfg, context.seed, processes
        self.log, self.conditioning = context.log, context.conditioning
        folder = Path(cfg.cache) if cfg.cache else None
        self.latents = LatentCache(
            policy, folder, DTYPES[cfg.cache_dtype], cfg.max_frames, processes=processes
        )
        unguided = conditional(policy)  # as matching evaluates it
        assert isinstance(unguided, Policy)
        self.texts = PromptEmbeddingCache(unguided, folder, processes=processes)
        self.examples = self._training_examples(context.requires)
        self.order = EpochSampler(self.seed, [self._available_from(e) for e in self.examples])
        held_out = cfg.held_out_dataset
        shown = self._encode(held_out, context.requires) if held_out else []
        fields = BatchFields.of(self.examples)
        fields.check(context.requires, cfg.path)
        self.collator = Collator(self.latents, self.texts, fields)
        self.held_out_collator = Collator(self.latents, self.texts, BatchFields.of(shown))
        self.held_out_examples = processes.share(shown[: cfg.held_out_pairs])
        if folder:
            context.log(cache_report(self.latents, self.texts, processes))

    @override
    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Build batches ahead in a thread, while the policy learns from the previous one."""
        for batch, waited in prefetch(self.batch, steps, _AHEAD):
            yield replace(batch, metrics={"timing/waited": waited})

    @override
    def held_out(self) -> Examples | None:
        """Return held-out pairs, without mirroring or dropout."""
        held_out = self.held_out_examples
        return self.held_out_collator.build(held_out) if held_out else None

    def _training_examples(self, requires: Set[Label]) -> list[Example]:
        cfg = self.cfg
        examples = self._encode(cfg.dataset, requires)
        unlabelled = sum(isinstance(e, Sample) and e.desirable is None for e in examples)
        if unlabelled:
            self.log(f"{unlabelled} of {len(examples)} samples have no label: desirable")
        if cfg.weighting is None:
            return examples
        return list(cfg.weighting.weigh([e for e in examples if isinstance(e, Pair)]))

    @override
    def batch(self, step: int) -> Batch:
        places = self.order.batch(step, self.cfg.batch_size)
        local = self.processes.share(range(len(places)))
        examples = [self.examples[places[i]] for i in local]
        chances = self.cfg.flip, self.cfg.prompt_dropout, self.cfg.user_dropout
        draws = torch.rand(
            len(chances), len(places), generator=generator(self.seed, "augment", step)
        )
        augmented = draws < torch.tensor(chances)[:, None]
        flips, drop_prompt, drop_user = augmented[:, local[0] : local[0] + len(local)].tolist()
        batch = self.collator.build(examples, flips, drop_prompt, drop_user)
        return Batch(batch, local[0], len(places))

    def _available_from(self, example: Example) -> int:
        """Return the step from which a pair of a curriculum is used."""
        return example.stage * self.cfg.stage_steps if isinstance(example, Pair) else 0

    def _encode(self, dataset: PreferenceDataset, requires: Set[Label]) -> list[Example]:
        """Read and encode a dataset, and drop what cannot be encoded."""
        queue = EncodeQueue(self.latents, self.cfg.flip > 0)
        examples, dropped = dataset.read("labels" in requires, queue.take)
        queue.finish()
        examples = drop_misfits(examples, self.texts.policy.input_spec, dropped)
        if self.conditioning:
            examples = [condition_example(example, self.conditioning) for example in examples]
        self.texts.prepare(collect_requests(examples, self.cfg.prompt_dropout > 0))
        kept = []
        for example in examples:
            why = [queue.failed[m] for m in media_of(example) if m in queue.failed]
            dropped.add(why[0]) if why else kept.append(example)
        self._report_dropped(f"{dataset.kind} of {dataset.path}", len(kept), dropped)
        return kept

    def _report_dropped(self, what: str, kept: int, dropped: DropReport) -> None:
        """Log what was dropped; raise ValueError if it is too much."""
        lines = [line[:_LONGEST_LINE] for line in dropped.lines()]
        total, unusable = dropped.total, dropped.unusable
        head = f"{total} of the {kept + total} {what} are left out, {unusable} of them unusable"
        if not kept or unusable > self.cfg.max_dropped_fraction * (kept + unusable):
            limit = f"recipe.data.max_dropped_fraction is {self.cfg.max_dropped_fraction:g}"
            raise ValueError("\n".join([f"{head}; {limit}", *lines[:4]]))
        if lines:
            self.log("\n".join([head, *lines]))

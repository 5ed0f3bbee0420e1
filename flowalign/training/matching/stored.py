"""Serve examples of a dataset on disk, encoded once and cached."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from typing_extensions import override

from flowalign.data.encode_once import (
    EncodeQueue,
    LatentCache,
    PromptEmbeddingCache,
    cache_report,
)
from flowalign.data.preference.collate import Collator
from flowalign.data.preference.convert import drop_misfits
from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.data.preference.preference_data import (
    Example,
    GapWeights,
    Pair,
    Sample,
    collect_requests,
    condition_example,
    media_of,
)
from flowalign.data.preference.validate import DropReport
from flowalign.data.prefetch import EpochSampler, prefetch
from flowalign.distributed.processes import Processes
from flowalign.sampling.sampling_settings import DTYPES
from flowalign.training.learner import Learner
from flowalign.training.matching.source import (
    BatchStream,
    DataSource,
    StepAdvantages,
    StepExamples,
    StreamContext,
    refuse_teachers,
)
from flowalign.training.matching.stored_credit import (
    check_method,
    stored_values,
    weigh_stored_steps,
)
from flowalign.training.recipe import RecipePlan, RunContext
from flowalign.training.reference import conditional
from flowalign.types import Batch, CreditEstimator, ModelPlan, Policy
from flowalign.utils.errors import require_default
from flowalign.utils.live_objects import find_object
from flowalign.utils.ranges import NonNegativeInt, PositiveInt, UnitInterval, require_ranges
from flowalign.utils.seeds import generator

_AHEAD = 2
_LONGEST_LINE = 300


@dataclass(frozen=True, kw_only=True)
class StoredDataset(PreferenceDataset, DataSource):
    """Pairs or labelled samples from a dataset on disk."""

    path: str
    """Path of the dataset: a file, or a folder of parquet files."""
    held_out: str | None = None
    """Path of held-out pairs, which are only used to evaluate the agreement of the policy. They are
    pairs even if `kind` is samples. Null: none."""
    batch_size: PositiveInt = 64
    """Number of pairs or samples per step, over all processes."""
    cache: str | None = None
    """Folder of cached latents and prompt embeddings, shared by runs. Null: kept in memory."""
    cache_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the cached latents."""
    max_frames: PositiveInt | None = None
    """Largest number of video frames, evenly spaced and independent of the frame rate. Null: the
    policy's number of frames at its frame rate, from the start."""
    flip: UnitInterval = 0.0
    """Probability in [0, 1] that both samples of a pair are mirrored. Leave it at 0 for prompts
    with left or right."""
    prompt_dropout: UnitInterval = 0.0
    """Probability in [0, 1] that a pair is trained without its prompt. It preserves the
    unconditional branch for guidance."""
    user_dropout: UnitInterval = 0.0
    """Probability in [0, 1] that a personalised policy is trained without the user (PPD)."""
    weighting: GapWeights | None = None
    """Weights of pairs as a function of the gap between their scores. Null: equal weights."""
    stage_steps: NonNegativeInt = 0
    """Number of steps per curriculum stage: pairs of stage k are used after k stages. 0: no
    curriculum."""
    credit: CreditEstimator | None = None
    """Credit method from `flowalign.credit`, for pairs with the columns `values_chosen` and
    `values_rejected`: lists of the values of the denoising states 0 to T. The lead of the chosen
    item's credit weights the noise levels of each step, relative to the mean lead; steps without a
    lead are skipped. Null: equal weights."""
    held_out_pairs: PositiveInt = 256
    """Largest number of held-out pairs to evaluate."""
    max_dropped_fraction: UnitInterval = 0.05
    """Largest allowed share of unusable pairs or samples; above it the run does not start. Expected
    rows, such as ties and repeated pairs, are reported but not counted."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and pair settings for samples."""
        require_ranges(self, "recipe.data")
        if self.kind != "pairs":
            reason = f"kind is {self.kind}, not pairs (credit of samples needs ScoredGroups)"
            require_default(self, "recipe.data", reason, "credit")
        if self.credit is not None:
            check_method(self.credit)
        if not self.paired:
            pairwise = "weighting", "stage_steps", "skip_choices"
            require_default(self, "recipe.data", f"kind is {self.kind}, not pairs", *pairwise)

    @property
    def held_out_dataset(self) -> PreferenceDataset | None:
        """Return the dataset of held-out pairs, or None."""
        if self.held_out is None:
            return None
        kind = self.kind if self.paired else "pairs"
        return replace(self, path=self.held_out, kind=kind, skip_choices=0)

    @property
    @override
    def paired(self) -> bool:
        """Return False for samples; a sample with attributes is compared with itself."""
        return self.kind in ("pairs", "attributes")

    @property
    @override
    def sampled_weights(self) -> None:
        return None

    @property
    @override
    def gives(self) -> Set[str]:
        pairs = {"segments", "region", "region_strength"} if self.kind == "pairs" else set()
        return {"desirable", "scores"} | pairs

    @override
    def check_teachers(self, names: Sequence[str]) -> None:
        """Raise ValueError for pairs with a teacher, attributes without one, or several."""
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
        if not run.evaluates:
            require_default(self, "recipe.data", "evaluation, which reads it, is null", "held_out")
        if run.policy.user_conditioning is None:
            reason = f"policy {type(run.policy).__name__} has no user conditioning"
            require_default(self, "recipe.data", reason, "user_dropout")
        run.policy.check_stored_media("recipe.data")
        for path in (self.path, self.held_out):
            known = path is None or path.startswith("hub:") or find_object(path) is not None
            if not (known or Path(path or "").exists()):
                raise ValueError(f"recipe.data: {path!r} does not exist (looked in {Path.cwd()})")
        if run.conditioning:
            self.check_conditioning(run.conditioning, run.policy)

    @override
    def check_data(self, policy: Policy) -> None:
        frames = None if self.max_frames else policy.num_frames
        examples = self.check_rows(policy.input_spec, frames)
        if self.credit is not None:
            stored_values([example for example in examples if isinstance(example, Pair)])

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        return RecipePlan(rows={f"{self.kind} per step": str(self.batch_size)})

    @override
    def open(self, learner: Learner, context: StreamContext) -> "StoredStream":
        """Read, validate and encode the data; raise ValueError if too many rows are unusable."""
        return StoredStream(self, learner.policy, learner.processes, context)


class StoredStream(BatchStream):
    """Stream of batches from a loaded and encoded dataset."""

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
        self.examples = self._training_examples(context.needs)
        self.steps = self._step_weights(policy)
        """Weights of the denoising steps of every pair, if there is credit; else None."""
        self.order = EpochSampler(self.seed, [self._available_from(e) for e in self.examples])
        held_out = cfg.held_out_dataset
        shown = self._encode(held_out, context.needs) if held_out else []
        self.collator = Collator(self.latents, self.texts, self.examples)
        self.collator.check(context.needs, cfg.path)
        self.held_out_collator = Collator(self.latents, self.texts, shown)
        self.held_out_examples = processes.share(shown[: cfg.held_out_pairs])
        if folder:
            context.log(cache_report(self.latents, self.texts, processes))

    @override
    def batches(self, steps: Iterable[int]) -> Iterator[StepExamples]:
        """Yield batches that a thread builds ahead while the policy is trained."""
        for batch, waited in prefetch(self.batch, steps, _AHEAD):
            yield replace(batch, metrics={"timing/waited": waited})

    @override
    def held_out(self) -> Batch | None:
        """Return held-out pairs, without mirroring or dropout."""
        held_out = self.held_out_examples
        return self.held_out_collator.build(held_out) if held_out else None

    def _training_examples(self, needs: Set[str]) -> list[Example]:
        cfg = self.cfg
        examples = self._encode(cfg, needs)
        unlabelled = sum(isinstance(e, Sample) and e.desirable is None for e in examples)
        if unlabelled:
            self.log(f"{unlabelled} of {len(examples)} samples have no label: desirable")
        if cfg.weighting is None:
            return examples
        return list(cfg.weighting.weigh([e for e in examples if isinstance(e, Pair)]))

    @override
    def batch(self, step: int) -> StepExamples:
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
        steps = self.steps and self.steps.take(torch.tensor([places[i] for i in local]))
        return StepExamples(batch, local[0], len(places), steps=steps)

    def _step_weights(self, policy: Policy) -> StepAdvantages | None:
        """Return the weights of the denoising steps of the pairs; None without credit."""
        if self.cfg.credit is None:
            return None
        pairs = [example for example in self.examples if isinstance(example, Pair)]
        return weigh_stored_steps(self.cfg.credit, pairs, policy, self.log)

    def _available_from(self, example: Example) -> int:
        """Return the step from which a pair of a curriculum is used."""
        return example.stage * self.cfg.stage_steps if isinstance(example, Pair) else 0

    def _encode(self, dataset: PreferenceDataset, needs: Set[str]) -> list[Example]:
        """Read and encode a dataset, and drop examples that cannot be encoded."""
        queue = EncodeQueue(self.latents, self.cfg.flip > 0)
        examples, dropped = dataset.read("desirable" in needs, queue.take)
        queue.finish()
        examples = drop_misfits(examples, self.texts.policy.input_spec, dropped)
        if self.conditioning:
            examples = [condition_example(example, self.conditioning) for example in examples]
        self.texts.prepare(collect_requests(examples, self.cfg.prompt_dropout > 0))
        kept = []
        for example in examples:
            why = [queue.failed[m] for m in media_of(example) if m in queue.failed]
            dropped.add(why[0]) if why else kept.append(example)
        self._report_dropped(f"{dataset.kind} of {dataset.name}", len(kept), dropped)
        return kept

    def _report_dropped(self, what: str, kept: int, dropped: DropReport) -> None:
        """Log the dropped rows; raise ValueError if there are too many."""
        lines = [line[:_LONGEST_LINE] for line in dropped.lines()]
        total, unusable = dropped.total, dropped.unusable
        head = f"{total} of the {kept + total} {what} are left out, {unusable} of them unusable"
        if not kept or unusable > self.cfg.max_dropped_fraction * (kept + unusable):
            limit = f"recipe.data.max_dropped_fraction is {self.cfg.max_dropped_fraction:g}"
            raise ValueError("\n".join([f"{head}; {limit}", *lines[:4]]))
        if lines:
            self.log("\n".join([head, *lines]))

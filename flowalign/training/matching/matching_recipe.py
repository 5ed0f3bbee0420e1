"""Train with matching losses on noised clean latents, from stored data or rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from typing_extensions import override

from flowalign.rewards.checked import OnFailure
from flowalign.training.learner import Learner
from flowalign.training.matching.matching_loop import MatchingLoop
from flowalign.training.matching.matching_settings import STEP_FIELD, MatchingSettings
from flowalign.training.matching.reference_models import start_from
from flowalign.training.matching.source import DataSource, StreamContext
from flowalign.training.matching.states import SamplerGrid
from flowalign.training.recipe import Log, Loop, MemoryPart, Recipe, RecipePlan, RunContext
from flowalign.training.reference import check_guidance
from flowalign.types import ModelPlan, Policy
from flowalign.types.losses import FIELDS, STEPS
from flowalign.utils.errors import require_default


@dataclass(frozen=True, kw_only=True)
class Matching(MatchingSettings, Recipe):
    """Recipe for training on pairs, labels or scored samples: DPO, KTO, fine-tuning, NFT."""

    data: DataSource
    """Source of the examples: `StoredDataset`, `Rollouts`, `ScoredGroups` or your own class."""
    on_failed_reward: OnFailure = field(default="raise", init=False)
    """Fixed to raise: stored data need no reward, and rollouts have a separate setting."""

    @property
    @override
    def prompt_files(self) -> Sequence[str]:
        return self.data.prompt_files

    @property
    @override
    def examples_per_step(self) -> int:
        return self.data.examples_per_step

    @override
    def check(self, run: RunContext) -> None:
        self._check_loss_and_data()
        self._check_references()
        self._check_states(run.policy)
        self._check_fields(run.policy)
        self.data.check(run)

    @override
    def check_data(self, run: RunContext) -> None:
        self.data.check_data(run.policy)

    @override
    def check_context(self) -> None:
        self.data.check_context()

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        data, loss = self.data, type(self.loss).__name__
        self.times.check(model.sigmas, self.times_per_sample)
        if data.examples_per_step < world:
            raise ValueError(
                f"recipe.data gives {data.examples_per_step} pairs or samples per step, fewer "
                f"than the {world} processes: raise its batch size or prompts_per_step"
            )
        batch = data.examples_per_step * (2 if data.paired else 1)
        rows = batch * self.times_per_sample
        passes, per_row = rows * self.epochs_per_step, self.states.rows
        counts = {"training": per_row, **self.evaluations_beside(run.policy)}
        reference = type(self.reference).__name__ if self.needs_reference else None
        made, size = data.plan(run, model, world), prod(model.latent_shape)
        return RecipePlan(
            prompts_per_step=made.prompts_per_step,
            rows={
                "loss": f"{loss}, reference {reference}" if reference else f"{loss}, no reference",
                **made.rows,
            },
            parts=[
                MemoryPart("latents", 4 * (batch // world) * size),
                MemoryPart("noise", 4 * (rows // (1 + data.paired) // world) * size),
                *made.parts,
            ],
            evaluations_per_example=(1 + data.paired) * per_row,
            decode_batch=made.decode_batch,
            work=made.work.plus(
                {name: passes * n for name, n in counts.items()}, data.credit is not None
            ),
            weight_copies=self.reference.weight_copies + len(self.averages) + len(self.teachers),
        )

    @override
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        if self.cold_start != "policy":
            start_from(self.cold_start, learner, [t.path for t in self.teachers.values()])
        learner.fields["reference"] = self.reference.field(learner)
        for name, average in self.averages.items():
            average.follow(learner, name)
        for name, teacher in self.teachers.items():
            learner.fields[name] = teacher.field(learner)
        step = self.states.field(learner.policy)
        learner.fields |= {} if step is None else {STEP_FIELD: step}
        context = StreamContext(run.rewards, run.seed, self.loss.needs, log, run.conditioning)
        stream = self.data.open(learner, context)
        return MatchingLoop(self, learner, stream, run.seed, log)

    def _check_loss_and_data(self) -> None:
        """Raise ValueError if the loss does not fit the data."""
        loss = type(self.loss).__name__
        if self.loss.paired and not self.data.paired:
            raise ValueError(
                f"recipe.loss {loss} compares pairs, but recipe.data gives samples: "
                "set recipe.data.kind to pairs, or choose KTO, RWR or SFT"
            )
        if missing := sorted(self.loss.needs - self.data.gives - {*FIELDS}):
            raise ValueError(
                f"recipe.loss {loss} needs {', '.join(missing)}, which data of class "
                f"{type(self.data).__name__} does not give: see docs/concepts/matching_losses.md"
            )
        if "places" in self.data.gives and not self.loss.uses_places:
            raise ValueError(
                f"recipe.data.spatial gives advantages of latent positions, but recipe.loss {loss} "
                "has one advantage per sample: choose NFT, or set recipe.data.spatial to null"
            )
        size = self.data.rows_per_group
        if "group" in self.loss.needs and self.micro_batch < size:
            raise ValueError(
                f"recipe.micro_batch is {self.micro_batch}, but {type(self.loss).__name__} "
                f"compares all of the {size} samples of a group: make it at least as large"
            )
        if self.loss.whole_batch:
            self.check_whole_batch(self.data.examples_per_step)

    def _check_states(self, policy: Policy) -> None:
        """Raise ValueError if the state source does not fit the data or the loss."""
        states, loss, data = type(self.states).__name__, type(self.loss).__name__, self.data
        steps = data.trajectory_steps
        compares = data.paired or "group" in self.loss.needs or self.loss.whole_batch
        if self.states.visited != (steps is not None):
            raise ValueError(
                f"recipe.states is {states}, and data of class {type(data).__name__} are "
                f"{'no ' if steps is None else ''}trajectories: VisitedStates and OnPolicyStates "
                "go together"
            )
        if steps is not None:
            self._check_visited(steps, policy)
        if self.states.rows > 1 and compares:
            raise ValueError(
                f"recipe.states is {states}, which adds rows to each sample, but {loss} or "
                "recipe.data compare samples: choose a loss of single samples, such as SFT"
            )

    def _check_fields(self, policy: Policy) -> None:
        """Raise ValueError if the policy does not support the references, teachers or states."""
        if self.needs_reference:
            self.reference.check(policy)
        for teacher in self.teachers.values():
            teacher.check(policy)
        scale = self.states.scale(policy)
        if scale is not None:
            check_guidance(policy, scale, "recipe.states.guidance_scale")

    def _check_visited(self, num_steps: int, policy: Policy) -> None:
        """Raise ValueError if `times` does not select visited states that the loss can use."""
        times, loss = self.times, type(self.loss).__name__
        if not isinstance(times, SamplerGrid) or times.num_steps != num_steps:
            raise ValueError(
                "recipe.states is VisitedStates, so recipe.times must be a SamplerGrid of the "
                f"{num_steps} steps of recipe.data.sampling; it is {times}"
            )
        query = self.data.query
        if query is not None and [*times.steps] != [query]:
            raise ValueError(
                f"recipe.data.ascent.query is {query}, but recipe.times has the steps "
                f"{[*times.steps]}: set times.start to {query}, and stop to {query + 1}"
            )
        if not STEPS & self.loss.needs:
            return
        if fixed := sorted({*times.steps} - self.data.random_steps):
            raise ValueError(
                f"recipe.loss {loss} needs random steps, but recipe.times has the steps {fixed}, "
                "at which recipe.data.sampling draws no noise: move times.start and stop, or "
                "sampling.sde_window"
            )
        if policy.evaluations_per_velocity > 1:
            reason = f"recipe.loss {loss} compares the policy without guidance with its own steps"
            remedy = "set it to 1.0, or take SFT with teachers"
            raise ValueError(f"policy.guidance is {policy.guidance}, but {reason}: {remedy}")

    def _check_references(self) -> None:
        """Raise ValueError if a configured reference would not be evaluated."""
        self.data.check_teachers([*self.teachers])
        self.check_averages(self.data.sampled_weights or "nothing")
        if not self.needs_reference:
            reason = f"{type(self.loss).__name__} needs none, and recipe.kl is 0"
            require_default(self, "recipe", reason, "reference")

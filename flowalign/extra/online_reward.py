"""Train with a learned reward that is refreshed on the policy's rollouts between the steps.

step of the inner loop -> a few of its rollouts -> trusted scores -> pairs -> head of the reward
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.agreement import list_pairs
from flowalign.functional.rating import Features
from flowalign.functional.reward_loss import bradley_terry
from flowalign.rewards.checked import OnFailure, check_spec
from flowalign.rewards.composite import Rewards
from flowalign.training.engine import Term, make_update
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.recipe import Log, Loop, Recipe, RecipePlan, RunContext
from flowalign.training.reference import TrainedSet
from flowalign.types import Batch, MediaBatch, ModelPlan, Refreshable, RewardModel, RewardOutput
from flowalign.types.losses import Loss
from flowalign.utils.ranges import NonNegativeFloat, PositiveInt, require_ranges


class Recorder(RewardModel):
    """Reward model that wraps another one and records the samples of the first groups."""

    def __init__(self, model: RewardModel, num_groups: PositiveInt):
        self.model, self.spec, self.num_groups = model, model.spec, num_groups
        self.kept: list[MediaBatch] = []
        self.groups: dict[int, int] = {}
        """Position of each recorded group, by its id."""

    @override
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores, and record the samples of the first groups.

        Raises:
            ValueError: The samples have no groups.
        """
        if not batch.groups:
            raise ValueError(
                "recipe.inner compares no samples of the same prompt, so there are no pairs: use "
                "PolicyGradient, ScoredGroups or TDM with a surrogate"
            )
        for group in batch.groups:
            if len(self.groups) < self.num_groups:
                self.groups.setdefault(group, len(self.groups))
        rows = [i for i, group in enumerate(batch.groups) if group in self.groups]
        if rows:
            some = batch.take(rows)
            self.kept.append(replace(some, media=some.media.detach().cpu().clone()))
        return self.model.score(batch)

    def taken(self) -> MediaBatch | None:
        """Return and clear the recorded samples, with consecutive group ids; None if empty."""
        kept, self.kept = self.kept, []
        places, self.groups = self.groups, {}
        if not kept:
            return None
        whole = MediaBatch.concat(kept)
        return replace(whole, groups=[places[group] for group in whole.groups])


class RewardHead(TrainedSet):
    """Parameters of a reward's head; they require gradients only inside `active`."""

    def __init__(self, model: RewardModel, columns: Sequence[int]):
        assert isinstance(model, Refreshable), "the recipe takes only such rewards"
        self.model, self.columns = model, list(columns)
        self.named = dict(model.head())

    @override
    @contextmanager
    def active(self) -> Iterator[None]:
        before = {name: p.requires_grad for name, p in self.named.items()}
        for p in self.named.values():
            p.requires_grad_(True)
        try:
            yield
        finally:
            for name, p in self.named.items():
                p.requires_grad_(before[name])

    def scores(self, features: Features) -> Float[Tensor, "n D"]:
        """Return the scores in the refreshed dimensions."""
        return self.model.score_features(features)[:, self.columns]


class OnlineRewardLoop(Loop):
    """Wrapper of a loop that refreshes the reward head after every `every` steps."""

    def __init__(
        self,
        cfg: "OnlineReward",
        inner: Loop,
        recorder: Recorder,
        learner: Learner,
        head: RewardHead,
        trusted: Rewards,
    ):
        self.cfg, self.inner, self.recorder = cfg, inner, recorder
        self.learner, self.head, self.trusted = learner, head, trusted

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        steps = list(steps)
        for step, metrics in zip(steps, self.inner.run(steps), strict=True):
            batch, start = self.recorder.taken(), time.perf_counter()
            if (step + 1) % self.cfg.every:
                yield metrics
                continue
            found = self._refresh(batch)
            yield metrics | found | {"timing/refresh": time.perf_counter() - start}

    @override
    def evaluate(self) -> dict[str, float]:
        return self.inner.evaluate()

    @override
    def draw(self) -> float:
        return self.inner.draw()

    @override
    def state(self) -> dict[str, Any]:
        return {"inner": self.inner.state()}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.inner.restore(state["inner"])

    def _refresh(self, batch: MediaBatch | None) -> dict[str, float]:
        """Train the head on the pairs of all processes, and return the metrics.

        Each process contributes the pairs of its recorded samples.
        """
        processes, asked = self.learner.processes, 0 if batch is None else len(batch)
        lead, loss = self._judge(batch) if batch else (torch.zeros(0, 1), None)
        counted = {"asked": float(asked), "pairs": float((lead != 0).sum())}
        total = processes.sum_by_name(counted)
        metrics = {f"refresh/{name}": value for name, value in total.items()}
        if not total["pairs"]:
            return metrics
        term = Term(
            rows=Batch({"row": torch.arange(len(lead))}),
            total=int(total["pairs"]),
            sums=True,
            losses=lambda _: [loss()] if loss else [],
            micro_batch=max(len(lead), 1),
        )
        for update in range(self.cfg.head_updates):
            mean = make_update(self.learner, [term])
            if update == 0:  # log the values before the head is trained
                metrics |= {f"refresh/{name}": mean[name] for name in ("loss", "agreement")}
        return metrics

    def _judge(self, batch: MediaBatch) -> tuple[Float[Tensor, "p D"], Callable[[], Loss]]:
        """Return the trusted score differences of all pairs, and the loss of the head on them.

        A difference is 0 for ties and unknown scores.
        """
        cfg, output = self.cfg, self.trusted.score(batch)
        if cfg.on_failed_reward == "raise":
            self.trusted.require(output, lambda i: f"prompt {batch.prompts[i]!r}")
        columns = [self.trusted.dims.index(dim) for dim in cfg.dims.values()]
        first, second = list_pairs(torch.tensor(batch.groups))
        lead = output.values[first][:, columns] - output.values[second][:, columns]
        told = lead.isfinite() & (lead.abs() > cfg.min_gap)
        lead, features = torch.where(told, lead, 0.0), self.head.model.features(batch)
        return lead, partial(self._loss, lead, first, second, features)

    def _loss(
        self,
        lead: Float[Tensor, "p D"],
        first: Int[Tensor, "p"],
        second: Int[Tensor, "p"],
        features: Features,
    ) -> Loss:
        """Return the sum of the loss over all pairs and dimensions, and the sums for the log."""
        with self.head.active():
            scores = self.head.scores(features)
        a, b = scores[first.to(scores.device)], scores[second.to(scores.device)]
        lead = lead.to(scores.device)
        loss = (bradley_terry(a, b, (lead > 0).to(a)) * (lead != 0)).sum()
        right = ((a - b).detach() * lead > 0).sum()
        return loss, {"loss": loss.detach(), "agreement": right}


@dataclass(frozen=True, kw_only=True)
class OnlineReward(Recipe):
    """Recipe that trains with an inner recipe and refreshes a learned reward between its steps.

    A trusted reward that is too slow for all samples scores a few groups per step. The head of the
    learned reward is trained to order pairs in the same way. The inner recipe uses only rewards
    with a weight. Rewards without a weight are only evaluated on held-out prompts.

    Sources: JarvisEvo, arXiv:2511.23002, and Cooper (for language models) train the reward together
    with the policy, on trusted scores of the policy's samples. We have not read their code; this
    loop is our choice.
    """

    inner: Recipe
    """Recipe that trains the policy; it must sample groups per prompt."""
    trusted: RewardModel
    """Trusted but slow reward model, such as a verifier or a judge, which scores few rollouts."""
    dims: Mapping[str, str]
    """Map from each refreshed dimension of the learned reward to the dimension of `trusted` that it
    is trained on. All refreshed dimensions must belong to one reward model with a trainable
    head."""
    every: PositiveInt = 1
    """Number of training steps between two refreshes."""
    groups: PositiveInt = 4
    """Number of groups per step that `trusted` scores, over all processes; at least one per
    process."""
    head_updates: PositiveInt = 4
    """Number of updates of the head per refresh, each on all pairs."""
    min_gap: NonNegativeFloat = 0.0
    """Difference of trusted scores above which two samples form a pair."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=1e-3))
    """AdamW of the head."""
    micro_batch: int = field(init=False)
    """Micro-batch of the inner recipe."""
    on_failed_reward: OnFailure = field(init=False)
    """Action after a failed reward, from the inner recipe; it also applies to `trusted`."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, "recipe")
        object.__setattr__(self, "micro_batch", self.inner.micro_batch)
        object.__setattr__(self, "on_failed_reward", self.inner.on_failed_reward)
        check_spec(self.trusted)
        known = self.trusted.spec.dims
        if missing := [dim for dim in self.dims.values() if dim not in known]:
            raise ValueError(
                f"recipe.dims names {missing[0]}, which recipe.trusted does not score: it has "
                f"{', '.join(known)}"
            )

    @property
    @override
    def open_files(self) -> Sequence[str]:
        return self.inner.open_files

    @property
    @override
    def prompt_files(self) -> Sequence[str]:
        return self.inner.prompt_files

    @property
    @override
    def updates(self) -> int:
        return self.inner.updates

    @property
    @override
    def examples_per_step(self) -> int:
        return self.inner.examples_per_step

    @property
    @override
    def sampler(self) -> tuple[int, int] | None:
        return self.inner.sampler

    @override
    def check(self, run: RunContext) -> None:
        self._learned(run.rewards)
        if run.rewards.dims and self.trusted.spec.modality == "video" and run.policy.fps is None:
            raise ValueError(
                "recipe.trusted scores videos, but the policy makes images: choose an image reward"
            )
        self.inner.check(self._seen(run))

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        if self.groups < world:
            raise ValueError(
                f"recipe.groups is {self.groups}, fewer than the {world} processes: give at least "
                "one group per process"
            )
        plan = self.inner.plan(self._seen(run), model, world)
        often = "step" if self.every == 1 else f"{self.every} steps"
        rows = {
            "trusted reward": f"{self.trusted.spec.name}, for {self.groups} groups every {often}",
            "refreshed head": f"{', '.join(self.dims)}: {self.head_updates} updates every {often}",
        }
        return replace(plan, rows={**plan.rows, **rows})

    @override
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        learned = self._learned(run.rewards)
        share = learner.processes.share(range(self.groups))
        recorder = Recorder(learned, len(share))
        seen = self._seen(run)
        models = [recorder if model is learned else model for model in seen.rewards.models]
        recorded = replace(seen, rewards=replace(seen.rewards, models=models))
        trusted = Rewards(
            [self.trusted],
            dict.fromkeys(self.dims.values(), 1.0),
            self.on_failed_reward,
            run.rewards.costs,
        )
        trusted.load()
        head = RewardHead(learned, [learned.spec.dims.index(dim) for dim in self.dims])
        refreshments = run.num_steps // self.every
        taught = learner.add_companion(
            "head", self.optimizer, refreshments * self.head_updates, head
        )
        inner = self.inner.open(recorded, learner, folder, log)
        return OnlineRewardLoop(self, inner, recorder, taught, head, trusted)

    def _learned(self, rewards: Rewards) -> RewardModel:
        """Return the reward model with the head to refresh.

        Raises:
            ValueError: The dimensions do not belong to one reward model with a trainable head, or
                none of them has a weight.
        """
        owners = [m for m in rewards.models if {*m.spec.dims} & {*self.dims}]
        known = [dim for m in rewards.models if isinstance(m, Refreshable) for dim in m.spec.dims]
        if len(owners) != 1 or {*self.dims} - {*owners[0].spec.dims}:
            raise ValueError(
                f"recipe.dims names {', '.join(self.dims)}, which must be dimensions of a single "
                f"reward with a trainable head; the run has {', '.join(known) or 'none'}"
            )
        if not isinstance(owners[0], Refreshable):
            raise ValueError(
                f"recipe.dims names {', '.join(self.dims)} of reward {owners[0].spec.name!r}, "
                "which has no trainable head: use reward_models.TrainedReward"
            )
        if not any(rewards.weight_of.get(dim) for dim in self.dims):
            raise ValueError(
                f"recipe.dims names {', '.join(self.dims)}, but none of them has a weight: weight "
                "at least one in reward_weights"
            )
        return owners[0]

    def _seen(self, run: RunContext) -> RunContext:
        """Return the run context for the inner recipe, with only the weighted rewards."""
        return replace(run, rewards=run.rewards.weighted())

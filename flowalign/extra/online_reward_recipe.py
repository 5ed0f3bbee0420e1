"""Define the recipe with a learned reward that is refreshed on the policy's rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from flowalign.extra.online_reward_loop import (
    OnlineRewardLoop,
    OnlineRewardSettings,
    Recorder,
    RewardHead,
)
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.recipe import Log, Loop, Recipe, RecipePlan, RunContext
from flowalign.types import ModelPlan, Refreshable, RewardModel


@dataclass(frozen=True, kw_only=True)
class OnlineReward(OnlineRewardSettings, Recipe):
    """Recipe that trains with an inner recipe and refreshes a learned reward between its steps.

    A trusted reward that is too slow for all samples scores a few groups per step. The head of the
    learned reward is trained to order pairs in the same way. The inner recipe uses only rewards
    with a weight. Rewards without a weight are only evaluated on held-out prompts.

    Sources: JarvisEvo, arXiv:2511.23002, and Cooper (for language models) train the reward together
    with the policy, on trusted scores of the policy's samples. We have not read their code; this
    loop is our choice.
    """

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

"""Define the recipe that distils a policy into a few-step sampler: TDM, or TDM-R1 with a reward."""

from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path

from typing_extensions import override

from flowalign.data.requests import Requests, read_requests
from flowalign.extra.tdm_loop import TDMLoop
from flowalign.extra.tdm_parts import TDMSettings, open_roles
from flowalign.rewards.checked import OnFailure
from flowalign.training.checkpoint import check_start
from flowalign.training.learner import Learner
from flowalign.training.recipe import (
    Log,
    Loop,
    MemoryPart,
    Recipe,
    RecipePlan,
    RunContext,
    StepWork,
    TrainingPrompts,
    check_prompts_per_step,
    judge_row,
    samples_row,
)
from flowalign.training.reference import check_guidance, find_scale
from flowalign.types import ModelPlan, Policy

_TRAINED = 4
"""Number of copies of a further set of trained weights: values, gradients, two AdamW moments."""


@dataclass(frozen=True, kw_only=True)
class TDM(TrainingPrompts, TDMSettings, Recipe):
    """Recipe for few-step distillation by matching distributions along trajectories.

    Up to three sets of trained weights share one network. The policy becomes the generator. The
    fake score learns the distribution of the generator's samples. With a reward, a surrogate
    learns to prefer better samples. The initial model is the real score.

    Source: TDM, arXiv:2503.06674, and TDM-R1, arXiv:2603.07700, as implemented in Flow-Factory.
    """

    start: str | None = None
    """Folder of a checkpoint with the generator's initial weights, such as one trained by TDM.
    Null: the initial model."""
    on_failed_reward: OnFailure = field(default="raise", init=False)
    """Fixed to raise: the surrogate has a separate setting."""

    @property
    @override
    def sampler(self) -> tuple[int, int]:
        return self.num_steps, self.micro_batch

    @override
    def check(self, run: RunContext) -> None:
        if run.policy.evaluations_per_velocity > 1:
            raise ValueError(
                f"policy.guidance is {run.policy.guidance}, but a generator of few steps samples "
                'without guidance: set guidance to "off", and recipe.real_guidance to model'
            )
        if self.start:
            check_start(self.start, "recipe.start")
        scale = find_scale(run.policy, self.real_guidance)
        self.check_guidance(scale)
        check_guidance(run.policy, scale, "recipe.real_guidance")
        if self.surrogate:
            self.surrogate.advantages.check("recipe.surrogate", run, self.prompts)
        else:
            run.check_conditioning()
            read_requests(self.prompts)

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        check_prompts_per_step("recipe", self.prompts_per_step, world)
        local = ceil(self.prompts_per_step / world) * self.samples_per_prompt
        states = 4 * local * (self.num_steps + 1) * prod(model.latent_shape)
        companions = 1 + bool(self.surrogate)
        return RecipePlan(
            rows=self._rows(run),
            work=self._work(run),
            parts=[MemoryPart("states", states)],
            decode_batch=self.micro_batch if self.surrogate else 0,
            prompts_per_step=self.prompts_per_step,
            weight_copies=_TRAINED * companions + bool(self.surrogate),
        )

    @override
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        roles = open_roles(self, learner, run.num_steps)
        if self.start:
            learner.policy.load_weights(self.start)
            for average in learner.averages.values():
                average.restart()
        rewards = run.rewards
        if self.surrogate:
            rewards = replace(rewards, on_failure=self.surrogate.on_failed_reward)
        requests = Requests(read_requests(self.prompts), run.seed, run.conditioning)
        return TDMLoop(self, roles, rewards, requests, log)

    def evaluations(self, policy: Policy) -> dict[str, int]:
        """Return the network evaluations of one step, by purpose."""
        guided = 1 + (find_scale(policy, self.real_guidance) > 1)
        rewarded, rows = bool(self.surrogate), self.rows
        return {
            "sampling": rows,
            "training the fake score": rows * self.fake.updates,
            "training the surrogate": rows * rewarded,
            "training the generator": rows,
            "real score": rows * (guided + bool(self.guidance_weight)),
            "fake score": rows,
            "surrogate": rows * rewarded * guided,
            "reference and slow copy of the surrogate": 2 * rows * rewarded,
        }

    def _work(self, run: RunContext) -> StepWork:
        decodes = self.examples_per_step if self.surrogate else 0
        return StepWork(
            evaluations=self.evaluations(run.policy),
            decodes=decodes,
            reward_calls=decodes * len(run.rewards.models),
        )

    def _rows(self, run: RunContext) -> dict[str, str]:
        rows = {
            **samples_row(self.prompts_per_step, self.samples_per_prompt),
            "boundaries per step": f"{self.rows}, {self.num_steps} of each sample",
            "trained on one network": "generator, fake score"
            + (", surrogate reward" if self.surrogate else ""),
            "evaluations of a sample": f"{self.num_steps}",
            "updates per step": f"1 of the generator, {self.fake.updates} of the fake score"
            + (", 1 of the surrogate reward" if self.surrogate else ""),
        }
        if self.surrogate:
            groups = [self.samples_per_prompt] * self.prompts_per_step
            rows |= judge_row(run.rewards.models, groups)
        return rows

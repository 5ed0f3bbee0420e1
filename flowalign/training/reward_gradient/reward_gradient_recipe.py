"""Train with reward gradients through decoded samples: ReFL, DRaFT, FlowBP, SRPO."""

from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from typing_extensions import override

from flowalign.data.requests import Requests, read_requests
from flowalign.rewards.latent_gradient import check_gradients
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
    samples_row,
)
from flowalign.training.reward_gradient.reward_gradient_loop import RewardGradientLoop
from flowalign.training.reward_gradient.reward_gradient_settings import (
    RewardGradientSettings,
    check_frames,
)
from flowalign.types import ModelPlan, Policy, Request


@dataclass(frozen=True, kw_only=True)
class RewardGradient(TrainingPrompts, RewardGradientSettings, Recipe):
    """Recipe for training with differentiable rewards: sample, decode, score, differentiate."""

    @property
    @override
    def sampler(self) -> tuple[int, int] | None:
        return (self.start.num_steps, self.micro_batch) if self.start.num_steps else None

    @override
    def check(self, run: RunContext) -> None:
        run.rewards.check_weights()
        _check_conditioning(run)
        check_gradients(run.rewards, "RewardGradient")
        _check_policy(run.policy, self.detach_unconditional)
        check_frames(self.frames, run.policy, run.rewards)
        if self.relative:
            self.relative.check(run.rewards)
        self.start.check(run.policy, read_requests(self.prompts))
        self.check_regulariser(run)

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        check_prompts_per_step("recipe", self.prompts_per_step, world)
        assert run.policy.renderer, "a policy that cannot render was refused"
        local = ceil(self.prompts_per_step / world) * self.start.samples_per_prompt
        states = 4 * local * (self.start.num_steps + 1) * prod(model.latent_shape)
        rendering = run.policy.renderer.render_bytes(model.latent_shape)
        per_velocity = run.policy.evaluations_per_velocity
        fewer = {"recipe.micro_batch: 1": (self.micro_batch - 1) * rendering}
        return RecipePlan(
            rows=self._rows(run),
            work=self._work(run, per_velocity),
            prompts_per_step=self.prompts_per_step,
            parts=[
                MemoryPart("states", states),
                MemoryPart("rendering", self.micro_batch * rendering, "updating", fewer),
                *(self.regularised.plan(run, model, world) if self.regularised else ()),
            ],
            evaluations_per_example=max(
                self._together(per_velocity),
                self.regularised.rows_beside(self.micro_batch) if self.regularised else 0,
            ),
        )

    @override
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        requests = Requests(read_requests(self.prompts), run.seed, run.conditioning)
        rewards, regulariser = run.rewards.weighted(), self.regularised
        stored = regulariser.open(run, learner, log) if regulariser else None
        return RewardGradientLoop(self, learner, rewards, requests, run.seed, stored, log)

    def _together(self, per_velocity: int) -> int:
        """Return the number of evaluations per sample with activations in memory together."""
        return self.cost.together * (1 if self.detach_unconditional else per_velocity)

    def _work(self, run: RunContext, per_velocity: int) -> StepWork:
        samples, cost = self.examples_per_step, self.cost
        with_gradient = samples * (cost.replayed + cost.elsewhere)
        sampling = samples * self.start.num_steps * per_velocity
        if self.detach_unconditional:
            sampling += samples * cost.elsewhere * per_velocity
        scored = samples * cost.views
        return StepWork(
            evaluations={
                "sampling": sampling,
                "training": with_gradient * (1 if self.detach_unconditional else per_velocity),
                "reference": with_gradient * per_velocity if self.kl else 0,
                "training through the initial model": samples * cost.pulled_back * per_velocity,
                "training on stored media": self.regularised.rows if self.regularised else 0,
            },
            decodes=scored,
            reward_calls=scored * len(run.rewards.weighted().models) * (1 + bool(self.relative)),
            differentiates_rewards=True,
        )

    def _rows(self, run: RunContext) -> dict[str, str]:
        samples, cost = self.examples_per_step, self.cost
        return {
            **samples_row(self.prompts_per_step, self.start.samples_per_prompt),
            "gradient path": f"{type(self.gradient_path).__name__}, "
            f"{cost.replayed + cost.elsewhere:g} evaluations with gradient per sample, "
            f"at most {cost.together} kept at once",
            "samples in the whole run": f"{samples * run.num_steps}",
        }


def _check_conditioning(run: RunContext) -> None:
    """Raise ValueError for per-prompt rewards, because the gradient combines all rewards."""
    run.check_conditioning()
    asked = run.conditioning and run.conditioning.for_rollout(Request("a prompt"), 0).conditioned
    if asked and asked.dims:
        raise ValueError(
            f"conditioning {type(run.conditioning).__name__} trains each prompt on one reward, "
            "but RewardGradient combines all: use PolicyGradient, or Matching with ScoredGroups"
        )


def _check_policy(policy: Policy, detach_unconditional: bool) -> None:
    name = type(policy).__name__
    if policy.renderer is None:
        raise ValueError(
            f"policy {name} cannot decode with a gradient, which RewardGradient needs: take one of "
            "pipelines, or give it a flowalign.types.DifferentiableDecoder"
        )
    if detach_unconditional and policy.evaluations_per_velocity == 1:
        raise ValueError(
            f"recipe.detach_unconditional is true, but {name} samples without classifier-free "
            "guidance (policy.guidance is at most 1): set it to false"
        )

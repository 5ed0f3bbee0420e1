"""Distil a policy into a few-step sampler: TDM, or TDM-R1 with a reward.

    requests -> trajectories of K steps -> renoised boundaries
             -> fake score -> surrogate reward -> generator

A training *step* draws deterministic trajectories of the generator, which is the policy. On all
their boundaries it updates first the fake score, then the surrogate with the rewards of the
finished samples, then the generator. The generator moves towards the predictions of the initial
model and the surrogate, and away from those of the fake score.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests, read_requests
from flowalign.extra.tdm_parts import Boundaries, RewardSurrogate, Roles, TDMSettings, open_roles
from flowalign.functional.distribution_matching import (
    boundary,
    importance,
    moved_data_loss,
    signal_to_noise,
)
from flowalign.functional.noise_matching import sample_error
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.training.checkpoint import check_start
from flowalign.training.engine import EngineLoop, StepData, Term, WeightChecks, make_update
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
from flowalign.training.rollouts.collecting import CreditedRollouts
from flowalign.types import Batch, ModelPlan, Policy
from flowalign.types.losses import Loss

Key = tuple[int, str, int, int]
"""Seed, purpose, training step and update, which together seed a draw."""
BoundaryLoss = Callable[[int, Tensor, Key], Loss]
"""Function that returns the mean loss of some samples at a boundary, and scalars for the log."""


class TDMLoop(EngineLoop[Boundaries]):
    """Loop that distils the policy into a few-step sampler."""

    def __init__(
        self,
        cfg: TDMSettings,
        roles: Roles,
        rewards: Rewards,
        requests: Requests,
        log: Log = lambda _: None,
    ):
        self.cfg, self.roles, self.rewards, self.requests = cfg, roles, rewards, requests
        self.seed = requests.seed
        self.rollouts = CreditedRollouts(cfg.rollouts, roles.generator, rewards, self.seed)

        learners = roles.trained.values()
        self.checks = [WeightChecks(each, cfg.on_failed_check, log) for each in learners]

    @override
    def data(self, steps: Sequence[int]) -> Iterator[StepData[Boundaries]]:
        return (StepData(self._sample(step), self.cfg.examples_per_step) for step in steps)

    @override
    def train(self, step: int, data: Boundaries) -> dict[str, float]:
        """Make the updates of all roles, and return the metrics of each role's last update."""
        cfg, metrics = self.cfg, dict[str, float]()
        everyone = torch.arange(len(data.trajectory.requests))
        for update in range(cfg.fake.updates):
            key = self.seed, "fake", step, update
            loss = partial(self._fake_loss, data)
            metrics |= self._update("fake", data, everyone, cfg.examples_per_step, loss, key)
        if cfg.surrogate:
            estimate = self.rollouts.estimate(data.values)
            self.rollouts.estimator.learn(estimate.gathered.outcome)
            local, trained = estimate.gathered.local, estimate.train_mask[:, 0]
            loss = self._surrogate_loss(data, estimate.advantage[local, 0], cfg.surrogate)
            key, kept = (self.seed, "surrogate", step, 0), trained[local].nonzero()[:, 0]
            metrics |= estimate.metrics
            metrics |= self._update("surrogate", data, kept, int(trained.sum()), loss, key)
        loss, key = partial(self._generator_loss, data), (self.seed, "generator", step, 0)
        return metrics | self._update("generator", data, everyone, cfg.examples_per_step, loss, key)

    @override
    def state(self) -> dict[str, Any]:
        return self.rollouts.state()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.rollouts.restore(state)

    def _sample(self, step: int) -> Boundaries:
        """Return this process's trajectories of a step."""
        cfg, count = self.cfg, self.cfg.prompts_per_step
        values = self.rollouts.sample(self.requests.batch(step, count), step)
        first = self.roles.generator.processes.share(range(count))[0] * cfg.samples_per_prompt
        return Boundaries(values, first, cfg.query == "above")

    def _update(
        self,
        role: str,
        drawn: Boundaries,
        samples: Int[Tensor, "n"],
        total: int,
        loss: BoundaryLoss,
        key: Key,
    ) -> dict[str, float]:
        """Update one role on all boundaries of some samples, and return averaged metrics.

        `total` is the number of samples over all processes. Metrics of the generator have no
        prefix.
        """
        term = Term(
            rows=drawn.rows(samples),
            total=total * drawn.num_steps,
            losses=lambda rows: [loss(int(rows["k"][0]), rows["row"], key)],
            micro_batch=self.cfg.samples_together,
            apart=("k",),
        )
        metrics = make_update(self.roles.trained[role], [term])
        prefix = "" if role == "generator" else f"{role}/"
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    def _fake_loss(self, drawn: Boundaries, k: int, part: Int[Tensor, "n"], key: Key) -> Loss:
        """Return the weighted error of the fake score's prediction of the generator's samples."""
        cfg, (x, sigma, _) = self.cfg.fake, drawn.start(k, part)
        at = drawn.renoised(k, part, *boundary(x, drawn.velocity(k, part), sigma), key)
        weight = importance(at.noise, at.fresh, cfg.largest_importance)
        error = sample_error(at.predicted(self.roles.fake.field) - at.x0_hat)
        loss = (weight * signal_to_noise(at.t, cfg.largest_snr) * error).mean()
        return loss, {"loss": loss.detach(), "importance": weight.mean()}

    def _surrogate_loss(
        self, drawn: Boundaries, advantage: Float[Tensor, "n"], cfg: RewardSurrogate
    ) -> BoundaryLoss:
        """Return the preference loss of the surrogate, with shared noise for each group."""
        fields, size = self.roles.fields, drawn.trajectory.group_size

        def loss(k: int, part: Tensor, key: Key) -> Loss:
            x, sigma, _ = drawn.start(k, part)
            x0_hat, noise = boundary(x, drawn.velocity(k, part), sigma)
            at = drawn.renoised(k, part, x0_hat, noise, key, shared=True)
            target = at.noise - at.x0_hat

            def residual(name: str) -> Tensor:
                return fields[name].velocity(at.x, at.t, at.cond) - target

            with torch.no_grad():
                reference, slow = residual("reference"), residual("slow")
            columns = {
                "weight": torch.ones_like(at.t),
                "advantage": advantage[part].to(at.t),
                "group": (part // size).to(at.t.device),
                "policy": residual("surrogate"),
                "reference": reference,
                "old": slow,
            }
            grown = replace(cfg.loss, beta=cfg.loss.beta * (k + 1) / drawn.num_steps)
            return grown.loss(Batch(columns))

        return loss

    def _generator_loss(self, drawn: Boundaries, k: int, part: Int[Tensor, "n"], key: Key) -> Loss:
        """Return the loss that moves the generator's samples along the fields' differences."""
        cfg, fields, surrogate = self.cfg, self.roles.fields, self.cfg.surrogate
        x, sigma, cond = drawn.start(k, part)
        x0_hat, noise = boundary(x, self.roles.generator.policy.velocity(x, sigma, cond), sigma)
        at = drawn.renoised(k, part, x0_hat, noise, key)
        with torch.no_grad():
            real, fake = at.predicted(fields["real"]), at.predicted(fields["fake"])
        losses = {"tdm": moved_data_loss(x0_hat, real - fake, real, cfg.huber)}
        weights = {"tdm": 1.0, "guidance": cfg.guidance_weight}
        if cfg.guidance_weight:
            with torch.no_grad():
                plain = at.predicted(fields["reference"])
            scale = find_scale(self.roles.generator.policy, cfg.real_guidance)
            along = cfg.guidance_scale / (scale - 1) * (real - plain)
            losses["guidance"] = moved_data_loss(x0_hat, along, real, cfg.huber)
        if surrogate:
            weights["surrogate"] = surrogate.weight
            with torch.no_grad():
                better = at.predicted(fields["guided_surrogate"])
            losses["surrogate"] = moved_data_loss(x0_hat, better - real, better, cfg.huber)
        loss = torch.stack([weights[name] * each for name, each in losses.items()]).sum(0).mean()
        stats = {f"loss/{name}": each.detach().mean() for name, each in losses.items()}
        gap = sample_error(real - fake).mean()
        return loss, stats | {"policy_loss": loss.detach(), "real_minus_fake": gap}


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

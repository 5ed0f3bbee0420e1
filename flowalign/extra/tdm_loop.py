"""Run the loop of TDM and TDM-R1.

    requests -> trajectories of K steps -> renoised boundaries
             -> fake score -> surrogate reward -> generator

A training *step* draws deterministic trajectories of the generator, which is the policy. On all
their boundaries it updates first the fake score, then the surrogate with the rewards of the
finished samples, then the generator. The generator moves towards the predictions of the initial
model and the surrogate, and away from those of the fake score.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.extra.tdm_parts import Boundaries, RewardSurrogate, Roles, TDMSettings
from flowalign.functional.distribution_matching import (
    boundary,
    importance,
    moved_data_loss,
    signal_to_noise,
)
from flowalign.functional.noise_matching import sample_error
from flowalign.rewards.composite import Rewards
from flowalign.training.engine import EngineLoop, StepData, Term, WeightChecks, make_update
from flowalign.training.recipe import Log
from flowalign.training.reference import find_scale
from flowalign.training.rollouts.collecting import CreditedRollouts
from flowalign.types import Batch
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

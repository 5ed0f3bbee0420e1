"""Run the loop of TDM and TDM-R1.

    requests -> trajectories of K steps -> renoised boundaries
             -> fake score -> surrogate reward -> generator

A training *step* draws deterministic trajectories of the generator, which is the policy. On all
their boundaries it updates first the fake score, then the surrogate with the rewards of the
finished samples, then the generator. The generator moves towards the predictions of the initial
model and the surrogate, and away from those of the fake score.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from flowalign.sampling.rollout import RolloutOutputs, sample
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.sde_windows import NoSteps
from flowalign.training.engine import EngineLoop, StepData, Term, WeightChecks, make_update
from flowalign.training.recipe import Log
from flowalign.training.reference import find_scale
from flowalign.training.rollouts.advantages import AdvantageEstimator, outcome_credit
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch
from flowalign.types.losses import Loss
from flowalign.types.trajectory import Completion
from flowalign.utils.seeds import generator

Key = tuple[int, str, int, int]
"""Seed, purpose, training step and update, which together seed a draw."""
BoundaryLoss = Callable[[int, Tensor, Key], Loss]
"""Function that returns the mean loss of some samples at a boundary, and scalars for the log."""


@dataclass(frozen=True)
class ScoredSamples:
    """Advantages of this process's samples."""

    advantage: Float[Tensor, "n"]
    """Clipped advantage of each sample within its group."""
    trained: Int[Tensor, "m"]
    """Indices of the samples with known rewards."""
    total: int
    """Number of samples with known rewards over all processes."""


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
        self.seed, self.processes = requests.seed, roles.generator.processes
        surrogate = cfg.surrogate
        self.estimator = (
            AdvantageEstimator(surrogate.advantages, rewards, self.processes) if surrogate else None
        )

        learners = roles.trained.values()
        self.checks = [WeightChecks(each, cfg.on_failed_check, log) for each in learners]

    @override
    def data(self, steps: Sequence[int]) -> Iterator[StepData[Boundaries]]:
        return (StepData(self._sample(step), self.cfg.num_samples) for step in steps)

    @override
    def train(self, step: int, data: Boundaries) -> dict[str, float]:
        """Make the updates of all roles, and return the metrics of each role's last update."""
        cfg, roles, metrics = self.cfg, self.roles, dict[str, float]()
        everyone = torch.arange(len(data.trajectory.requests))
        for update in range(cfg.fake.updates):
            key = self.seed, "fake", step, update
            loss = partial(self._fake_loss, data)
            metrics |= self._update("fake", data, everyone, cfg.num_samples, loss, key)
        if cfg.surrogate and roles.surrogate:
            scored, found = self._score(data, cfg.surrogate)
            loss = self._surrogate_loss(data, scored, cfg.surrogate)
            key = self.seed, "surrogate", step, 0
            metrics |= found
            metrics |= self._update("surrogate", data, scored.trained, scored.total, loss, key)
        loss, key = partial(self._generator_loss, data), (self.seed, "generator", step, 0)
        return metrics | self._update("generator", data, everyone, cfg.num_samples, loss, key)

    @override
    def state(self) -> dict[str, Any]:
        return self.estimator.state() if self.estimator else {}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        if self.estimator:
            self.estimator.restore(state)

    def _sample(self, step: int) -> Boundaries:
        """Return this process's trajectories of a step."""
        cfg = self.cfg
        requests = self.requests.batch(step, cfg.prompts_per_step)
        local = self.processes.share(range(len(requests)))
        trajectory = sample(
            self.roles.generator.policy,
            [requests[i] for i in local],
            Sampling(
                num_steps=cfg.num_steps,
                samples_per_prompt=cfg.samples_per_prompt,
                sde_window=NoSteps(),
                micro_batch=cfg.micro_batch,
            ),
            (),
            [generator(self.seed, "noise", step, i) for i in local],
            keep=RolloutOutputs(),
        )
        return Boundaries(trajectory, local[0] * cfg.samples_per_prompt, cfg.query == "above")

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
        self, drawn: Boundaries, scored: ScoredSamples, cfg: RewardSurrogate
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
                "advantage": scored.advantage[part].to(at.t),
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

    def _score(
        self, drawn: Boundaries, cfg: RewardSurrogate
    ) -> tuple[ScoredSamples, dict[str, float]]:
        """Score the finished samples, and return their advantages and metrics."""
        estimator, trajectory = self.estimator, drawn.trajectory
        assert estimator is not None
        policy, size = self.roles.generator.policy, self.cfg.micro_batch
        values = CompletionValues(
            policy, self.rewards, trajectory, lambda _: {}, Completion(), size
        )
        outcome = values([trajectory.num_steps])[:, 0]
        credited, transform = outcome, cfg.advantages.value_transform
        if transform:
            credited = transform(outcome, self.rewards.dims, trajectory.requests)
        credit = outcome_credit(credited, trajectory.group_size)
        estimate = estimator.estimate(credit, outcome, trajectory.group_size)
        estimator.learn(estimate.gathered.outcome)
        local, trained = estimate.gathered.local, estimate.train_mask[:, 0]
        kept = trained[local].nonzero()[:, 0]
        scored = ScoredSamples(estimate.advantage[local, 0], kept, int(trained.sum()))
        return scored, dict(estimate.metrics)

"""Train with reward gradients through decoded samples: ReFL, DRaFT, FlowBP, SRPO.

    requests -> samples -> gradient path -> decode -> rewards -> gradient of latents -> update

A training *step* draws `prompts_per_step` x `samples_per_prompt` samples without gradient and makes
one *update*. A gradient path yields one or several *views* of each sample, which are decoded and
scored. The gradient at their latents is then backpropagated to the steps that the path replays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests, read_requests
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.path_gradient import reward_gradient_loss
from flowalign.rewards.composite import Rewards
from flowalign.rewards.latent_gradient import LatentGradient, check_gradients, latent_gradient
from flowalign.sampling.rollout_replay import CachedReplay
from flowalign.training.engine import (
    EngineLoop,
    Statistics,
    StepData,
    Term,
    WeightChecks,
    make_update,
)
from flowalign.training.learner import Learner
from flowalign.training.matching.regulariser import StoredTerms
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
from flowalign.training.reference import pull_back, unguided
from flowalign.training.reward_gradient.reward_gradient_settings import (
    RewardGradientSettings,
    check_frames,
    chosen_frames,
)
from flowalign.types import (
    Batch,
    MediaBatch,
    ModelPlan,
    Policy,
    RewardOutput,
    SampleView,
    Trajectory,
)
from flowalign.types.losses import Loss
from flowalign.utils.seeds import generator

_VIEWS = "views"
"""Statistic with one row per view of a sample."""


@dataclass(frozen=True)
class Samples:
    """Samples of this process in one step."""

    trajectory: Trajectory
    """Trajectories, with the states that the gradient path replays."""
    first: int
    """Global index of the first sample."""


class RewardGradientLoop(EngineLoop[Samples]):
    """Loop that samples, scores differentiably, and updates the policy."""

    def __init__(
        self,
        cfg: RewardGradientSettings,
        learner: Learner,
        rewards: Rewards,
        requests: Requests,
        seed: int,
        stored: StoredTerms | None = None,
        log: Log = lambda _: None,
    ):
        self.cfg, self.learner, self.rewards, self.seed = cfg, learner, rewards, seed
        self.requests, self.stored, self.views = requests, stored, cfg.cost.views
        self.conditional = unguided(learner.policy) if cfg.detach_unconditional else None
        self.regularised: Iterator[Term] | None = None
        """Losses of coming updates on the stored data that regularises the run, or None."""
        self.checks = [WeightChecks(learner, cfg.on_failed_check, log)]

    @override
    def data(self, steps: Sequence[int]) -> Iterator[StepData[Samples]]:
        self.regularised = self.stored(steps) if self.stored else None
        return (StepData(self.sample(step), self.cfg.examples_per_step) for step in steps)

    @override
    def train(self, step: int, data: Samples) -> dict[str, float]:
        statistics, metrics = Statistics(self.learner.processes), dict[str, float]()

        def report(means: dict[str, float]) -> dict[str, float] | None:
            metrics.update(self.metrics(statistics) | means)
            return {} if metrics["reward_invalid"] < 1 else None

        stored = [next(self.regularised)] if self.regularised else []
        terms = [self.term(step, data, statistics), *stored]
        return metrics | make_update(self.learner, terms, report)

    def sample(self, step: int) -> Samples:
        """Return this rank's samples of a step."""
        cfg, processes = self.cfg, self.learner.processes
        requests = self.requests.batch(step, cfg.prompts_per_step)
        local = processes.share(range(len(requests)))
        with torch.no_grad():
            trajectory = cfg.start.trajectory(
                self.learner.policy,
                [requests[i] for i in local],
                [generator(self.seed, "noise", step, i) for i in local],
            )
        return Samples(trajectory, local[0] * cfg.start.samples_per_prompt)

    def term(self, step: int, data: Samples, statistics: Statistics) -> Term:
        """Return the loss on all views of the samples."""
        cfg, row = self.cfg, torch.arange(len(data.trajectory.requests))
        part = (data.first + row) // (cfg.samples_per_draw or data.first + len(row))
        return Term(
            rows=Batch({"row": row, "part": part}),
            total=cfg.examples_per_step * self.views,
            sums=True,
            losses=partial(self._losses, step, data, statistics),
            micro_batch=cfg.micro_batch,
            apart=("part",),
            statistics=statistics,
        )

    def metrics(self, statistics: Statistics) -> dict[str, float]:
        """Return means over the usable views of all processes; all processes must call it."""
        rows = statistics.gathered(_VIEWS)
        usable = rows[rows[:, 0].isfinite()]
        names = ["reward_mean", "policy_loss", "latent_gradient", *(["kl"] if self.cfg.kl else [])]
        names += ["matched_loss"] if self.cfg.gradient_path.matches else []
        names += [f"reward/{dim}" for dim in self.rewards.dims]
        means = dict(zip(names, usable.mean(0).tolist(), strict=True))
        return means | {
            "reward_std": float(usable[:, 0].std(correction=0)) if len(usable) else float("nan"),
            "reward_invalid": 1 - len(usable) / len(rows),
        }

    def _losses(
        self, step: int, data: Samples, statistics: Statistics, rows: Batch
    ) -> Iterator[Loss]:
        """Yield the losses of each view of samples, to be backpropagated before the next view."""
        samples, part, policy = rows["row"], int(rows["part"][0]), self.learner.policy
        keys = [(self.seed, step, data.first + int(i)) for i in samples]
        base = partial(pull_back, self.learner.reference)
        replay = CachedReplay(policy, data.trajectory, samples, keys, self.conditional, base)
        # The string is part of the seed. Changing it would change every recorded run.
        drawn = generator(self.seed, "connection", step, *([part] if part else []))
        for view in self.cfg.gradient_path(replay, drawn):
            yield from self._view_losses(step, replay, view, statistics)
            replay.evaluated.clear()  # frees the graph of this view before the next

    def _view_losses(
        self, step: int, replay: CachedReplay, view: SampleView, statistics: Statistics
    ) -> Iterator[Loss]:
        """Yield the losses of a view, and add its rows for the log to the statistics.

        Columns: weighted reward, loss, root mean square of the gradient, the divergence if `kl` is
        set or the matched losses, then the scores of all dimensions.
        """
        cfg, found = self.cfg, self._latent_gradient(step, replay, view)
        weight = view.clean.new_ones(len(view.clean)) if view.weight is None else view.weight
        size = sample_error(found.gradient).sqrt().cpu()
        logged = [found.total, weight.cpu() * found.loss, size]
        if view.matched is not None:
            usable, total = found.total.isfinite(), torch.zeros_like(found.loss)
            for part in view.matched(found.gradient):
                each = part * usable.to(part)  # samples with a failed reward have no gradient
                yield each.sum(), {}
                total += each.detach().to(total)
            logged.append(total)
        else:
            loss = reward_gradient_loss(view.clean, found.gradient, weight)
            if cfg.kl:
                away = self._divergence(replay)
                loss = loss + cfg.kl * away.sum()
                logged.append(away.detach().cpu())
            yield loss, {}
        rows = torch.cat([torch.stack(logged, 1), found.output.values], 1)
        statistics.add({_VIEWS: rows}, 1.0)

    def _latent_gradient(self, step: int, replay: CachedReplay, view: SampleView) -> LatentGradient:
        cfg, rewards, policy = self.cfg, self.rewards, self.learner.policy

        def score(batch: MediaBatch) -> RewardOutput:
            if cfg.relative is None:
                return rewards.score_with_gradient(batch)
            return cfg.relative.score(rewards, batch, step, view.inverted, view.place)

        requests = [replay.trajectory.requests[int(i)] for i in replay.samples]
        frames = chosen_frames(cfg.frames, policy.num_frames, generator(self.seed, "frames", step))
        found = latent_gradient(policy, rewards, score, cfg.loss, view.clean, requests, frames)
        if cfg.on_failed_reward == "raise":
            rewards.require(found.output, lambda i: f"prompt {requests[i].prompt!r}")
        return found

    def _divergence(self, replay: CachedReplay) -> Float[Tensor, "n"]:
        """Return the mean squared difference from the reference over a view's evaluations."""
        reference = self.learner.reference
        away = [e.v - reference.velocity(e.x, e.sigma, replay.cond) for e in replay.evaluated]
        return torch.stack([sample_error(difference) for difference in away]).mean(0)


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
    if run.check_conditioning():
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

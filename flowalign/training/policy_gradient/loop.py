"""Run the policy-gradient loop.

    requests -> trajectory -> values -> credit -> advantages -> loss -> update

Glossary. A *step* of the loop samples `prompts_per_step` x `samples_per_prompt` trajectories and
makes `epochs_per_step` x `updates_per_step` *updates* (optimizer steps) from them; an update
accumulates the gradient over *micro-batches*. A *denoising step* k is one transition of a
trajectory.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.functional.combine import Multipliers
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.advantages import (
    GatheredCredit,
    StepObserver,
    StepResult,
    build_batch,
    compute_advantages,
    compute_credit,
    constraint_metrics,
    credit_metrics,
    gather_credit,
)
from flowalign.training.policy_gradient.batches import TrainBatch, minibatches, parts
from flowalign.training.policy_gradient.checks import PolicyGradientChecks
from flowalign.training.policy_gradient.chunks import with_log_ratios
from flowalign.training.policy_gradient.rollouts import collect_rollouts
from flowalign.training.policy_gradient.settings import Settings
from flowalign.training.recipe import Log, Loop
from flowalign.types import Minibatch
from flowalign.utils.seeds import generator


class PolicyGradientLoop(Loop):
    """Samples rollouts, credits their rewards to denoising steps, and updates the policy."""

    def __init__(
        self,
        cfg: Settings,
        learner: Learner,
        rewards: Rewards,
        requests: Requests,
        seed: int,
        observer: StepObserver | None = None,
        log: Log = lambda _: None,
    ):
        self.cfg, self.learner, self.rewards, self.seed = cfg, learner, rewards, seed
        self.requests, self.observer, self.log = requests, observer, log
        self.multipliers = cfg.thresholds.start(rewards.dims) if cfg.thresholds else None
        """Lagrange multipliers of reward dimensions that are held near thresholds."""

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        cfg, learner, rewards, seed = self.cfg, self.learner, self.rewards, self.seed
        checks = PolicyGradientChecks(cfg.algorithm, learner, cfg.on_failed_check, self.log)
        for step in steps:
            start = time.perf_counter()
            requests = self.requests.batch(step, cfg.prompts_per_step)
            values = collect_rollouts(cfg, learner, rewards, requests, seed, step)
            sampled = time.perf_counter()
            credit = compute_credit(cfg, values)
            gathered = gather_credit(cfg, learner.processes, values, credit)
            advantage = compute_advantages(cfg, gathered.credit, self.weights)
            batch = build_batch(cfg, learner.processes, values, gathered, advantage)
            metrics = self._finish_credit(gathered, advantage)
            if self.observer:
                self.observer(step, StepResult(batch, credit, values))
            credited = time.perf_counter()
            checks.before_update(_all_minibatches(batch, cfg.micro_batch))
            checked = time.perf_counter()
            metrics |= update(cfg, learner, batch, seed, step)
            checks.after_update(_all_minibatches(batch, cfg.micro_batch))
            done = time.perf_counter()
            metrics |= {
                "timing/sample": sampled - start,
                "timing/reward": credited - sampled,
                "timing/update": done - checked,
                "timing/step": done - start,
                "throughput": len(batch.global_mask) / (done - start),
            }
            yield metrics | checks.metrics()

    @property
    def weights(self) -> Float[Tensor, "R"]:
        """Return this step's reward weights: those of the run file, times the multipliers."""
        given = self.rewards.weights
        return given if self.multipliers is None else self.multipliers.scale(given)

    @override
    def evaluate(self) -> dict[str, float]:
        return {}

    @override
    def draw(self) -> float:
        return self.observer.draw() if self.observer else 0.0

    @override
    def state(self) -> dict[str, Any]:
        return {"multipliers": self.multipliers and self.multipliers.state()}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        if self.multipliers and state["multipliers"]:
            self.multipliers = self.multipliers.restored(state["multipliers"])

    def _finish_credit(
        self, gathered: GatheredCredit, advantage: Float[Tensor, "n T"]
    ) -> dict[str, float]:
        """Return metrics of the step's credit; then update the multipliers with its outcomes."""
        metrics = credit_metrics(self.rewards, gathered, advantage)
        metrics |= constraint_metrics(self.cfg, self.rewards, self.multipliers, gathered)
        self.multipliers = moved(self.cfg, self.multipliers, gathered.outcome)
        return metrics


def moved(
    cfg: Settings, multipliers: Multipliers | None, outcome: Float[Tensor, "n R"]
) -> Multipliers | None:
    """Return the multipliers after a step with these rewards of finished samples."""
    if cfg.thresholds is None or multipliers is None:
        return None
    return cfg.thresholds.after(multipliers, outcome)


def update(
    cfg: Settings, learner: Learner, batch: TrainBatch, seed: int, step: int
) -> dict[str, float]:
    """Make the updates of one step, and return metrics averaged over transitions and ranks."""
    totals: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    sampled_with = learner.num_updates
    for epoch in range(cfg.epochs_per_step):
        for part in parts(batch, cfg.updates_per_step, generator(seed, "order", step, epoch)):
            num_trained = int(batch.global_mask[part].sum())
            local = _local(batch, part)
            if batch.chunk is not None and learner.num_updates > sampled_with:
                batch = with_log_ratios(batch, local, learner.policy, cfg.micro_batch)
            for minibatch in minibatches(batch, local, cfg.micro_batch):
                loss, stats = cfg.algorithm.loss(learner.policy, learner.reference, minibatch)
                share = len(minibatch.x) / num_trained
                learner.backward(share * loss)
                for name, stat in stats.items():
                    totals[name] = totals.get(name, 0.0) + share / cfg.updates * stat
            metrics |= learner.step() if num_trained else {}
    means = torch.stack(list(totals.values())).tolist() if totals else []
    return metrics | learner.processes.total(dict(zip(totals, means, strict=True)))


def _local(batch: TrainBatch, samples: Int[Tensor, "n"]) -> Int[Tensor, "m"]:
    """Return the positions on this rank of those samples that it holds."""
    start, stop = batch.rank_offset, batch.rank_offset + len(batch.mask)
    return samples[(samples >= start) & (samples < stop)] - start


def _all_minibatches(batch: TrainBatch, micro_batch: int) -> Iterator[Minibatch]:
    return minibatches(batch, torch.arange(len(batch.mask)), micro_batch)

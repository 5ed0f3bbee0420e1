"""Run the policy-gradient loop.

    requests -> trajectory -> values -> credit -> advantages -> loss -> update

Glossary. A *step* of the loop samples `prompts_per_step` x `samples_per_prompt` trajectories and
makes `epochs_per_step` x `updates_per_step` *updates* (optimizer steps) from them; an update
accumulates the gradient over *micro-batches*. A *denoising step* k is one transition of a
trajectory.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.advantages import StepObserver, StepResult, build_batch
from flowalign.training.policy_gradient.batches import TrainBatch, minibatches, parts
from flowalign.training.policy_gradient.checks import PolicyGradientChecks
from flowalign.training.policy_gradient.chunks import with_log_ratios
from flowalign.training.policy_gradient.settings import Settings
from flowalign.training.policy_gradient.step_gradients import StepGradients
from flowalign.training.recipe import Log, Loop
from flowalign.training.rollouts.advantages import (
    compute_advantages,
    compute_credit,
    credit_metrics,
    gather_credit,
    process_advantages,
    transition_metrics,
)
from flowalign.training.rollouts.collecting import collect_rollouts
from flowalign.training.rollouts.comparison import RewardComparison
from flowalign.training.rollouts.critics import learned
from flowalign.training.rollouts.outcome_history import OutcomeHistory
from flowalign.training.rollouts.state_values import CompletionValues
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
        self.comparison = RewardComparison(cfg, rewards, learner.processes)
        """Comparison of credit, by weights that thresholds change."""
        self.steps = step_gradients(cfg, learner)
        """Gradients of denoising steps, if their weights are measured."""
        self.history = OutcomeHistory(cfg.history)
        """Outcomes of earlier steps that the credit method compares with."""
        self.critic = cfg.critic.start() if cfg.critic else None
        """What the critic has learned from the outcomes of earlier steps."""

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        cfg, learner, rewards, seed = self.cfg, self.learner, self.rewards, self.seed
        comparison = self.comparison
        checks = PolicyGradientChecks(cfg.algorithm, learner, cfg.on_failed_check, self.log)
        for step in steps:
            start = time.perf_counter()
            requests = self.requests.batch(step, cfg.prompts_per_step)
            values = collect_rollouts(cfg, learner, rewards, requests, seed, step, self.critic)
            values.history = self.history
            sampled = time.perf_counter()
            credit = compute_credit(cfg, values)
            gathered = gather_credit(comparison, values, credit)
            self.history.add([request.key for request in requests], gathered.outcome)
            advantage = compute_advantages(cfg, comparison, gathered.credit)
            averages = self.steps and self.steps.averages
            process = process_advantages(cfg, comparison, gathered.credit)
            given = values, gathered, advantage, averages, process
            batch = build_batch(cfg, learner.processes, *given)
            metrics = credit_metrics(comparison, gathered, advantage) | transition_metrics(gathered)
            comparison.learn(gathered.outcome)
            metrics |= self.learn(values)
            if self.observer:
                self.observer(step, StepResult(batch, credit, values))
            credited = time.perf_counter()
            checks.before_update(_all_minibatches(batch, cfg.micro_batch))
            checked = time.perf_counter()
            metrics |= update(cfg, learner, batch, seed, step, self.steps)
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

    @override
    def evaluate(self) -> dict[str, float]:
        return {}

    @override
    def draw(self) -> float:
        return self.observer.draw() if self.observer else 0.0

    @override
    def state(self) -> dict[str, Any]:
        return {
            **self.comparison.state(),
            "history": self.history.state(),
            "step_weight": self.steps and self.steps.state(),
            "critic": self.critic and self.critic.state(),
        }

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.comparison.restore(state)
        if self.steps and state.get("step_weight"):  # older checkpoints have none
            self.steps.restore(state["step_weight"])
        self.history.restore(state.get("history", []))  # which 0.1 did not save
        if self.critic and state.get("critic"):
            self.critic = self.critic.restored(state["critic"])

    def learn(self, values: CompletionValues) -> dict[str, float]:
        """Let the critic learn from outcomes that were credited; return how well it foresaw them.

        What it predicted of them before does not change.
        """
        if self.critic is None:
            return {}
        self.critic, metrics = learned(self.cfg, self.critic, self.learner.processes, values)
        return metrics


def step_gradients(cfg: Settings, learner: Learner) -> StepGradients | None:
    """Return what measures the weights of steps, or None if they are given."""
    if cfg.measured is None:
        return None
    return StepGradients(cfg.measured, learner, cfg.sampling.num_steps, cfg.updates_per_step)


def update(
    cfg: Settings,
    learner: Learner,
    batch: TrainBatch,
    seed: int,
    step: int,
    steps: StepGradients | None = None,
) -> dict[str, float]:
    """Make the updates of one step, and return metrics averaged over transitions and ranks.

    Step weights are measured in the first epoch: later on the weights have seen the samples.
    """
    totals: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    sampled_with = learner.num_updates
    for epoch in range(cfg.epochs_per_step):
        for part in parts(batch, cfg.updates_per_step, generator(seed, "order", step, epoch)):
            num_trained = int(batch.global_mask[part].sum())
            if batch.chunk is not None and learner.num_updates > sampled_with:
                local = _local(batch, part)
                batch = with_log_ratios(batch, local, learner.policy, cfg.micro_batch)
            backward = partial(_backward, cfg, learner, num_trained, totals)
            if steps and num_trained:
                steps.accumulate(batch, part, backward, measures=epoch == 0)
            else:
                deque(backward(batch, part), maxlen=0)
            metrics |= learner.step() if num_trained else {}
    means = torch.stack(list(totals.values())).tolist() if totals else []
    metrics |= learner.processes.total(dict(zip(totals, means, strict=True)))
    return metrics | (steps.metrics(batch.weight) if steps else {})


def _backward(
    cfg: Settings,
    learner: Learner,
    num_trained: int,
    totals: dict[str, Tensor],
    batch: TrainBatch,
    samples: Int[Tensor, "n"],
) -> Iterator[int]:
    """Accumulate gradient and statistics of these samples; yield the step of each minibatch."""
    for minibatch in minibatches(batch, _local(batch, samples), cfg.micro_batch):
        loss, stats = cfg.algorithm.loss(learner.policy, learner.reference, minibatch)
        share = len(minibatch.x) / num_trained
        learner.backward(share * loss)
        for name, stat in stats.items():
            totals[name] = totals.get(name, 0.0) + share / cfg.updates * stat
        yield minibatch.k


def _local(batch: TrainBatch, samples: Int[Tensor, "n"]) -> Int[Tensor, "m"]:
    """Return the positions on this rank of those samples that it holds."""
    start, stop = batch.rank_offset, batch.rank_offset + len(batch.mask)
    return samples[(samples >= start) & (samples < stop)] - start


def _all_minibatches(batch: TrainBatch, micro_batch: int) -> Iterator[Minibatch]:
    return minibatches(batch, torch.arange(len(batch.mask)), micro_batch)

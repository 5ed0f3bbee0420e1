"""Run the policy-gradient loop.

    requests -> trajectory -> values -> credit -> advantages -> loss -> update

Glossary. A training *step* samples `prompts_per_step` x `samples_per_prompt` trajectories and makes
`epochs_per_step` x `updates_per_step` *updates* (optimizer steps) with them. An update accumulates
the gradient over *micro-batches*. A *denoising step* k is one transition of a trajectory.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.rewards.composite import Rewards
from flowalign.training.engine import Accumulation, Part
from flowalign.training.learner import Learner
from flowalign.training.matching.regulariser import StoredGradient
from flowalign.training.policy_gradient.batches import RolloutBatch, minibatch, parts, portions
from flowalign.training.policy_gradient.build_batch import StepObserver, StepResult, build_batch
from flowalign.training.policy_gradient.checks import PolicyGradientChecks
from flowalign.training.policy_gradient.chunks import with_log_ratios
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.policy_gradient.step_gradients import StepGradients
from flowalign.training.recipe import Log, Loop
from flowalign.training.rollouts.credited import CreditedRollouts, compute_credit
from flowalign.utils.seeds import generator


class PolicyGradientLoop(Loop):
    """Loop that samples rollouts, credits rewards to denoising steps, and updates the policy."""

    def __init__(
        self,
        cfg: PolicyGradientSettings,
        learner: Learner,
        rewards: Rewards,
        requests: Requests,
        seed: int,
        observer: StepObserver | None = None,
        log: Log = lambda _: None,
        stored: StoredGradient | None = None,
    ):
        self.cfg, self.learner, self.seed = cfg, learner, seed
        self.requests, self.observer, self.log = requests, observer, log
        self.costs = rewards.costs
        self.rollouts = CreditedRollouts(cfg.rollouts, learner, rewards, seed)
        self.reference = cfg.reference.follow(learner) if cfg.reference else None
        """Reference of the KL that follows the policy; None if it is fixed."""
        self.steps = step_gradients(cfg, learner)
        """Measurement of the gradients of denoising steps; None if step weights are fixed."""
        self.stored = stored
        """Gradient of the stored data that regularises the run, or None."""

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        cfg, learner, seed = self.cfg, self.learner, self.seed
        checks = PolicyGradientChecks(cfg.algorithm, learner, cfg.on_failed_check, self.log)
        steps = list(steps)
        numbers = [step * cfg.updates + i for step in steps for i in range(cfg.updates)]
        regularised = self.stored.steps(numbers) if self.stored else None
        for step in steps:
            start = time.perf_counter()
            requests = self.requests.batch(step, cfg.prompts_per_step)
            values = self.rollouts.sample(requests, step)
            sampled = time.perf_counter()
            credit = compute_credit(self.rollouts.cfg, values)
            estimate = self.rollouts.estimate(values, credit)
            averages = self.steps and self.steps.averages
            batch = build_batch(cfg, learner.processes, values, estimate, averages)
            metrics = {**estimate.metrics, **estimate.size_metrics, **estimate.transition_metrics}
            metrics |= self.rollouts.learn(requests, values, estimate)
            if self.observer:
                self.observer(step, StepResult(batch, credit, values))
            credited = time.perf_counter()
            with self.costs.paused():  # checks are no cost of training
                checks.before_update(batch, cfg.micro_batch)
            checked = time.perf_counter()
            metrics |= checks.terms.compare(
                update(cfg, learner, batch, seed, step, self.steps, regularised)
            )
            with self.costs.paused():
                checks.after_update(batch, cfg.micro_batch, metrics)
            if self.reference:
                metrics |= self.reference.after_step(metrics.get("kl", 0.0))
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
    def draw(self) -> float:
        return self.observer.draw() if self.observer else 0.0

    @override
    def state(self) -> dict[str, Any]:
        return {
            **self.rollouts.state(),
            "step_weight": self.steps and self.steps.state(),
            "reference": self.reference and self.reference.state(),
        }

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.rollouts.restore(state)
        if self.steps and state["step_weight"]:
            self.steps.restore(state["step_weight"])
        if self.reference and state["reference"]:
            self.reference.restore(state["reference"])


def step_gradients(cfg: PolicyGradientSettings, learner: Learner) -> StepGradients | None:
    """Return the measurement of step weights, or None if the weights are fixed."""
    if cfg.measured is None:
        return None
    return StepGradients(cfg.measured, learner, cfg.sampling.num_steps, cfg.updates_per_step)


def update(
    cfg: PolicyGradientSettings,
    learner: Learner,
    batch: RolloutBatch,
    seed: int,
    step: int,
    steps: StepGradients | None = None,
    regularised: Iterator[dict[str, float]] | None = None,
) -> dict[str, float]:
    """Make the updates of one step, and return metrics averaged over transitions and ranks.

    Each update takes one item of `regularised`, which accumulates a gradient of stored data.
    Step weights are measured only in the first epoch, because later the policy was already trained
    on the samples.
    """
    gradient, metrics = Accumulation(learner, 1 / cfg.updates), dict[str, float]()
    sampled_with = learner.num_updates
    for epoch in range(cfg.epochs_per_step):
        for part in parts(batch, cfg.updates_per_step, generator(seed, "order", step, epoch)):
            num_trained = int(batch.global_mask[part].sum())
            # Before the first update all ratios are 1, so chunks need no evaluation.
            if "chunk" in batch.steps and learner.num_updates > sampled_with:
                local = _local(batch, part)
                batch = with_log_ratios(batch, local, learner.policy, cfg.micro_batch)
            backward = partial(_backward, cfg, gradient, num_trained)
            if steps and num_trained:
                steps.accumulate(batch, part, backward, measures=epoch == 0)
            else:
                deque(backward(batch, part), maxlen=0)  # runs the generator, keeps nothing
            stored = next(regularised) if regularised else {}
            metrics |= stored | (learner.step() if num_trained or stored else {})
    return metrics | gradient.means() | (steps.metrics(batch.weight) if steps else {})


def _backward(
    cfg: PolicyGradientSettings,
    gradient: Accumulation,
    num_trained: int,
    batch: RolloutBatch,
    samples: Int[Tensor, "n"],
) -> Iterator[int]:
    """Add the gradient of the samples; yield the step of each micro-batch."""
    fields = batch.fields(gradient.learner.policy, gradient.learner.reference)
    return gradient.add(
        Part(
            len(chosen) / num_trained,
            partial(cfg.algorithm.loss, fields, minibatch(batch, k, chosen)),
            k,
        )
        for k, chosen in portions(batch, _local(batch, samples), cfg.micro_batch)
    )


def _local(batch: RolloutBatch, samples: Int[Tensor, "n"]) -> Int[Tensor, "m"]:
    """Return the local positions of the samples that are on this rank."""
    start, stop = batch.rank_offset, batch.rank_offset + len(batch.mask)
    return samples[(samples >= start) & (samples < stop)] - start

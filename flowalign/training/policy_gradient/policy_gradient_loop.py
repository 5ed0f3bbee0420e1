"""Run the policy-gradient loop.

    requests -> trajectory -> values -> credit -> advantages -> loss -> update

Glossary. A training *step* samples `prompts_per_step` x `samples_per_prompt` trajectories and makes
`epochs_per_step` x `updates_per_step` *updates* (optimizer steps) with them. An update accumulates
the gradient over *micro-batches*. A *denoising step* k is one transition of a trajectory.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.distributed.processes import Processes
from flowalign.functional.surrogate import step_weights
from flowalign.functional.transition import log_density
from flowalign.rewards.composite import Rewards
from flowalign.training.engine import (
    MOST_STEPS,
    AuxiliaryTerms,
    EngineLoop,
    Statistics,
    StepData,
    Term,
    WeightChecks,
    make_update,
)
from flowalign.training.learner import Learner
from flowalign.training.matching.regulariser import StoredTerms
from flowalign.training.policy_gradient.batches import (
    RolloutBatch,
    minibatches,
    parts,
    policy_term,
    prepare_for_loss,
    with_log_ratios,
)
from flowalign.training.policy_gradient.credit_record import CreditRecorder, StepResult
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.policy_gradient.step_gradients import Averages, StepGradients
from flowalign.training.recipe import Log
from flowalign.training.rollouts.advantages import AdvantageEstimate
from flowalign.training.rollouts.collecting import CreditedRollouts, compute_credit
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch, Trajectory, VelocityField, step_of, steps_of
from flowalign.utils.costs import Costs, stage
from flowalign.utils.seeds import generator


def build_batch(
    cfg: PolicyGradientSettings,
    processes: Processes,
    values: CompletionValues,
    estimate: AdvantageEstimate,
    averages: Averages | None = None,
) -> RolloutBatch:
    """Return this rank's transitions with advantages, in pairs or chunks if the loss needs them.

    `averages` determine measured step weights. If None, the starting weights are used.
    """
    trajectory, mask, local = values.trajectory, estimate.train_mask, estimate.gathered.local
    everyone = estimate.gathered.outcome
    advantage = estimate.advantage[local]
    samples = {"advantage": advantage, "mask": mask[local]}
    if cfg.kl_gate:
        gate = cfg.kl_gate(everyone, values.rewards, values.rewards.weights)
        samples |= {"has_kl": gate[local]}
    if cfg.spatial and cfg.spatial.blend:
        samples |= {"places": cfg.spatial(advantage, values)}
    if estimate.process is not None:
        samples |= {"process": estimate.process[local]}
    steps = {"weight": _weights_of_steps(cfg, trajectory, averages)}
    batch = RolloutBatch(trajectory, Batch(samples), Batch(steps), mask, local.start)
    return prepare_for_loss(batch, cfg.algorithm, processes)


def _weights_of_steps(
    cfg: PolicyGradientSettings, trajectory: Trajectory, averages: Averages | None
) -> Float[Tensor, "T"]:
    eta = trajectory.eta.amax(0)
    trained = trajectory.trained.any(0).to(eta.device)
    weight = step_weights(cfg.step_rule, trajectory.kernel, trajectory.sigmas, eta, trained)
    if cfg.measured is None:
        return weight
    return cfg.measured.weights(averages or Averages.none(len(weight)), weight, trained)


class PolicyGradientLoop(EngineLoop[RolloutBatch]):
    """Loop that samples rollouts, credits rewards to denoising steps, and updates the policy."""

    def __init__(
        self,
        cfg: PolicyGradientSettings,
        learner: Learner,
        rewards: Rewards,
        requests: Requests,
        seed: int,
        observer: CreditRecorder | None = None,
        log: Log = lambda _: None,
        stored: StoredTerms | None = None,
    ):
        self.cfg, self.learner, self.seed, self.stored = cfg, learner, seed, stored
        self.requests, self.observer = requests, observer
        sampled = replace(cfg.rollouts, keeps_graphs=cfg.keep_graphs)
        self.rollouts = CreditedRollouts(sampled, learner, rewards, seed)
        self.reference = cfg.reference.follow(learner) if cfg.reference else None
        """Reference of the KL that follows the policy; None if it is fixed."""
        self.steps = step_gradients(cfg, learner)
        """Measurement of the gradients of denoising steps; None if step weights are fixed."""
        self.regularised: Iterator[Term] | None = None
        """Losses of coming updates on the stored data that regularises the run, or None."""
        self.first_steps = PolicyGradientChecks(cfg, learner, rewards.costs, log)
        self.checks = [self.first_steps.weights]

    @override
    def data(self, steps: Sequence[int]) -> Iterator[StepData[RolloutBatch]]:
        cfg = self.cfg
        numbers = [step * cfg.updates + i for step in steps for i in range(cfg.updates)]
        self.regularised = self.stored(numbers) if self.stored else None
        yield from map(self._sample, steps)

    def _sample(self, step: int) -> StepData[RolloutBatch]:
        """Return the rollouts of a step with their credit and advantages."""
        cfg, start = self.cfg, time.perf_counter()
        requests = self.requests.batch(step, cfg.prompts_per_step)
        values = self.rollouts.sample(requests, step)
        sampled = time.perf_counter()
        credit = compute_credit(self.rollouts.cfg, values)
        estimate = self.rollouts.estimate(values, credit)
        averages = self.steps and self.steps.averages
        batch = build_batch(cfg, self.learner.processes, values, estimate, averages)
        metrics = {**estimate.metrics, **estimate.size_metrics, **estimate.transition_metrics}
        metrics |= self.rollouts.learn(requests, values, estimate)
        if self.observer:
            self.observer(step, StepResult(batch, credit, values))
        metrics["timing/sample"] = sampled - start
        metrics["timing/reward"] = time.perf_counter() - sampled
        self.first_steps.before_update(batch)
        return StepData(batch, len(batch.global_mask), metrics)

    @override
    def train(self, step: int, data: RolloutBatch) -> dict[str, float]:
        cfg = self.cfg
        metrics = update(cfg, self.learner, data, self.seed, step, self.steps, self.regularised)
        metrics = self.first_steps.terms.compare(metrics)
        return metrics | (self.reference.after_step(metrics) if self.reference else {})

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
    stored: Iterator[Term] | None = None,
) -> dict[str, float]:
    """Make the updates of one step, and return metrics averaged over transitions and ranks.

    Each update adds one term of `stored`, a loss on stored data. Step weights are measured only in
    the first epoch, because later the policy was already trained on the samples.
    """
    statistics, metrics = Statistics(learner.processes, 1 / cfg.updates), dict[str, float]()
    sampled_with = learner.num_updates
    for epoch in range(cfg.epochs_per_step):
        for part in parts(batch, cfg.updates_per_step, generator(seed, "order", step, epoch)):
            # Before the first update all ratios are 1, so chunks need no evaluation.
            if "chunk" in batch.steps and learner.num_updates > sampled_with:
                batch = with_log_ratios(batch, batch.local(part), learner.policy, cfg.micro_batch)
            if steps:
                term = steps.term(cfg.algorithm, batch, part, cfg.micro_batch, epoch == 0)
            else:
                term = policy_term(cfg.algorithm, batch, part, learner, cfg.micro_batch)
            terms = [replace(term, statistics=statistics), *([next(stored)] if stored else [])]
            metrics |= make_update(learner, terms)
    batch.trajectory.graphs.clear()  # no update read those of masked transitions
    return metrics | statistics.means() | (steps.metrics(batch.weight) if steps else {})


class PolicyGradientChecks:
    """Automatic checks of a run before its first update and after its first updates.

    Each check detects a bug that occurred in a released code base: a rollout that training does not
    reproduce, a KL term without gradient, adapters that never change, ranks with other weights.
    """

    def __init__(self, cfg: PolicyGradientSettings, learner: Learner, costs: Costs, log: Log):
        self.cfg, self.algorithm, self.learner, self.costs = cfg, cfg.algorithm, learner, costs
        self.weights = WeightChecks(learner, cfg.on_failed_check, log, self._check_kl)
        self.batch: RolloutBatch | None = None
        """Batch of the current step, if the gradient of its KL is checked."""
        self.replayed, self.kl_due = False, "reference" in cfg.algorithm.needs
        self.terms = AuxiliaryTerms(log)

    @stage("check")
    def before_update(self, batch: RolloutBatch) -> None:
        """Check before the first update that the ratio of every stored transition is 1."""
        self.batch = batch if self.kl_due else None
        if self.replayed:
            return
        with self.costs.paused():  # checks are no cost of training
            drift = replay_drift(self.learner.policy, batch, self.cfg.micro_batch)
            modes = mode_drift(self.learner.policy, batch, self.cfg.micro_batch)
        self.replayed = bool(drift)
        for k, deviation in drift.items():
            self.weights.found[f"check/ratio_drift_{k}"] = deviation
        worst = max(drift, key=lambda k: drift[k], default=None)
        if worst is None:
            return
        each = " ".join(f"{deviation:.0e}" for deviation in drift.values())
        self.weights.log(
            f"ratio before the first update: off 1 by at most {drift[worst]:.1e} "
            f"(each step: {each}); clip range {self.algorithm.clip:g}"
        )
        if not drift[worst] <= self.algorithm.clip / 4:
            self.weights.fail(
                f"before any update the ratio of denoising step {worst} is off 1 by "
                f"{drift[worst]:.1e}, too much for a clip range of {self.algorithm.clip:g}: "
                "clipping would act on rounding noise.\n"
                "Make sampling.micro_batch and micro_batch equal, compute in fp32 or fp16, "
                "or widen the clip."
            )
        self.weights.found["check/mode_drift"] = modes
        if not modes <= self.algorithm.clip / 10:
            self.weights.fail(
                f"the same transition has log probabilities that differ by {modes:.1e} with and "
                f"without gradient, too much for a clip range of {self.algorithm.clip:g}: the "
                "update would clip what the rollout sampled.\n"
                "Set speed.compile to false and speed.attention to native, or widen the clip."
            )

    def _check_kl(self) -> None:
        """Check that the KL has a gradient, until it had one."""
        if not self.batch:
            return
        batch = self.batch
        loss, part = None, next(_all_minibatches(batch, self.cfg.micro_batch), None)
        with self.costs.paused():
            if part is not None:
                neutral = part.with_columns(advantage=torch.zeros_like(part["advantage"]))
                fields = batch.fields(self.learner.policy, self.learner.reference)
                loss, _ = self.algorithm.loss(fields, neutral.without("places", "has_kl"))
            size = self.learner.gradient_size(loss)
        self.kl_due = size == 0  # after tiny updates the policy may still equal the reference
        if part is None:
            return
        self.weights.found["check/kl_gradient"] = size
        if self.kl_due and self.weights.seen == MOST_STEPS:
            self.weights.fail(
                "the KL term has no gradient: the reference equals the policy, or it was detached."
            )


@torch.no_grad()
def replay_drift(policy: VelocityField, batch: RolloutBatch, micro_batch: int) -> dict[int, float]:
    """Return the largest |ratio - 1| of each denoising step before any update of the weights."""
    drift: dict[int, Tensor] = {}
    fields = batch.fields(policy, policy)
    for part in (step for one in _all_minibatches(batch, micro_batch) for step in steps_of(one)):
        k, current = step_of(part), fields.transition(policy, part)
        logp = log_density(fields.kernel, part["x_next"].float(), current)
        worst: Tensor = ((logp - part["logp_old"]).exp() - 1).abs().nan_to_num(torch.inf).max()
        drift[k] = torch.maximum(drift[k], worst) if k in drift else worst
    return {k: float(worst) for k, worst in drift.items()}


@torch.no_grad()
def mode_drift(policy: VelocityField, batch: RolloutBatch, micro_batch: int) -> float:
    """Return the largest |log ratio| between evaluations of a transition with and without gradient.

    Rollouts have no gradient, and compiled blocks or copies of weights may compute them differently
    than updates. The first transition of the first micro-batch is evaluated.
    """
    fields = batch.fields(policy, policy)
    for one in _all_minibatches(batch, micro_batch):
        for part in steps_of(one):
            plain = fields.transition(policy, part)
            with torch.enable_grad():
                recorded = fields.transition(policy, part)
            x = part["x_next"].float()
            found = log_density(fields.kernel, x, recorded) - log_density(fields.kernel, x, plain)
            return float(found.abs().nan_to_num(torch.inf).max())
    return 0.0


def _all_minibatches(batch: RolloutBatch, micro_batch: int) -> Iterator[Batch]:
    return minibatches(batch, torch.arange(len(batch.mask)), micro_batch)

"""Check the first steps of a run automatically, and report problems.

Each check detects a bug that occurred in a released code base: a rollout that training does not
reproduce, a KL term without gradient, adapters that never change, ranks with diverging weights.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flowalign.functional.transition import log_density
from flowalign.training.engine import MOST_STEPS, AuxiliaryTerms, WeightChecks
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import RolloutBatch, minibatches
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.recipe import Log
from flowalign.types import Batch, VelocityField, step_of, steps_of
from flowalign.utils.costs import Costs, stage


class PolicyGradientChecks:
    """Automatic checks of a run before its first update and after its first updates."""

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

"""Check the first steps of a run automatically, and report problems.

Each check detects a bug that occurred in a released code base: a rollout that training does not
reproduce, a KL term without gradient, adapters that never change, ranks with diverging weights.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flowalign.functional.transition import log_density
from flowalign.training.auxiliary_terms import AuxiliaryTerms
from flowalign.training.learner import Learner
from flowalign.training.recipe import Log
from flowalign.training.update_checks import MOST_STEPS, OnFailure, WeightChecks
from flowalign.types import Minibatch, PolicyLoss, VelocityField
from flowalign.utils.stages import stage


class PolicyGradientChecks:
    """Automatic checks of a run before its first update and after its first updates."""

    def __init__(self, algorithm: PolicyLoss, learner: Learner, on_failure: OnFailure, log: Log):
        self.algorithm, self.learner = algorithm, learner
        self.weights = WeightChecks(learner, on_failure, log)
        self.replayed, self.kl_due = False, algorithm.needs_reference
        self.terms = AuxiliaryTerms(log)

    @stage("check")
    def before_update(self, batches: Iterable[Minibatch]) -> None:
        """Check before the first update that the ratio of every stored transition is 1."""
        if self.replayed:
            return
        drift = replay_drift(self.learner.policy, batches)
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

    @stage("check")
    def after_update(self, batches: Iterable[Minibatch], metrics: Mapping[str, float]) -> None:
        """Check that parameters and the KL have gradients, and that ranks agree."""
        if self.weights.after_update(metrics) and self.kl_due:
            self._kl_gradient(next(iter(batches), None))

    def metrics(self) -> dict[str, float]:
        """Return the measurements since the last call."""
        return self.weights.metrics()

    def _kl_gradient(self, batch: Minibatch | None) -> None:
        loss = None
        if batch is not None:
            still = torch.zeros_like(batch.advantage)
            neutral = replace(batch, advantage=still, places=None, has_kl=None)
            loss, _ = self.algorithm.loss(self.learner.policy, self.learner.reference, neutral)
        size = self.learner.gradient_size(loss)
        self.kl_due = size == 0  # after tiny updates the policy may still equal the reference
        if batch is None:
            return
        self.weights.found["check/kl_gradient"] = size
        if self.kl_due and self.weights.seen == MOST_STEPS:
            self.weights.fail(
                "the KL term has no gradient: the reference equals the policy, or it was detached."
            )


@torch.no_grad()
def replay_drift(policy: VelocityField, batches: Iterable[Minibatch]) -> dict[int, float]:
    """Return the largest |ratio - 1| of each denoising step before any update of the weights."""
    drift: dict[int, Tensor] = {}
    for batch in (step for first in batches for step in first.span):
        logp = log_density(batch.kernel, batch.x_next.float(), batch.transition(policy))
        worst = ((logp - batch.logp_old).exp() - 1).abs().nan_to_num(torch.inf).max()
        drift[batch.k] = torch.maximum(drift.get(batch.k, worst), worst)
    return {k: float(worst) for k, worst in drift.items()}

"""Distil teachers into a student on its own trajectories (Flow-OPD).

Source: Flow-OPD, arXiv:2605.08063, and code of CostaliyA/Flow-OPD. Two mistakes of that code are
not here: it compares the log-ratio of each sample with the reward of every other one, and its
reward passes a gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.surrogate import gaussian_kl, gaussian_kl_no_dt, ppo_clip
from flowalign.functional.transition import Gaussian, log_density, per_row
from flowalign.losses.matching.links import require_positive
from flowalign.losses.policy_gradient.grpo import ratio_stats
from flowalign.types import (
    ALONE,
    Examples,
    LossContext,
    MatchingLoss,
    Requirements,
    Residuals,
    Transitions,
)
from flowalign.types.loss import Loss
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class OPD(MatchingLoss):
    """Averages weight * (distance to the teacher + anchor * distance to the reference) over rows.

    Distances are KL divergences of random steps from the states that the student visited. `SFT`
    regresses on the teacher's velocity, with the same minimum and without random steps.
    """

    form: Literal["released", "policy_gradient", "sampled"] = "released"
    """released: of the authors' code, its mode gkd, which minimises the KL to the teacher, without
    the length of the step in the denominator. policy_gradient: the paper's; the reward of a step is
    minus the KL to the teacher, without a gradient. It is the same whatever noise was drawn, so it
    has no gradient in expectation, either. sampled: the reward is the log-ratio of teacher and
    student for the step that was taken, whose expected gradient is that of minus the KL (ours)."""
    anchor: NonNegativeFloat = 0.04
    """Weight of the KL to the reference (MAR): a teacher of quality in the paper, the model before
    training in the code's default; 0: none."""
    clip: PositiveFloat = 1e-3
    """Largest change of the ratio from which the two forms with a reward learn."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_positive(clip=self.clip)
        if not self.anchor >= 0:
            raise ValueError(f"anchor is {self.anchor}; it must be at least 0")

    @property
    @override
    def requirements(self) -> Requirements:
        """Require random steps from visited states and, for the anchor, a reference."""
        return Requirements(
            reference=self.anchor > 0, paired=False, velocity=True, requires={"transitions"}
        )

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        steps = residuals.required_transitions
        divergence = self._kl(residuals.policy, steps)
        stats = {"teacher_kl": divergence.detach().mean()}
        if self.form == "released":
            each = divergence
        else:
            target = residuals.required_target
            logp = _logp(residuals.policy + target, steps)
            reward = -divergence if self.form == "policy_gradient" else _logp(target, steps) - logp
            log_ratio = logp - steps.logp_old
            each = ppo_clip(log_ratio, reward.detach(), self.clip)
            stats |= ratio_stats(log_ratio.detach(), reward.detach(), self.clip)
        if self.anchor:
            distance = self._kl(residuals.policy - residuals.required_reference, steps)
            each = each + self.anchor * distance
            stats["anchor_kl"] = distance.detach().mean()
        loss = (batch.weight * each).mean()
        return loss, stats | {"policy_loss": loss.detach()}

    def _kl(self, gap: Float[Tensor, "n *latent"], steps: Transitions) -> Float[Tensor, "n"]:
        """Return the KL of two steps whose velocities differ by `gap`."""
        student = _step(gap, steps)
        other = Gaussian(torch.zeros_like(gap), steps.std)
        if self.form == "released":
            return gaussian_kl_no_dt(student, other, steps.dt)
        return gaussian_kl(student, other)


def _logp(velocity: Float[Tensor, "n *latent"], steps: Transitions) -> Float[Tensor, "n"]:
    """Return the log-density of the steps that were taken, averaged over latent elements."""
    reached = _step(steps.travelled, steps).mean
    return log_density(steps.kernel, reached, _step(velocity, steps))


def _step(velocity: Float[Tensor, "n *latent"], steps: Transitions) -> Gaussian:
    """Return the steps under a velocity, up to what does not depend on it."""
    return Gaussian(per_row(steps.slope, velocity) * velocity, steps.std)

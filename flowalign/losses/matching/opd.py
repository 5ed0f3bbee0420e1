"""Distil teachers into a student on its own trajectories (Flow-OPD).

Source: Flow-OPD, arXiv:2605.08063, and code of CostaliyA/Flow-OPD. We fixed two mistakes of that
code: it combines the log-ratio of each sample with the rewards of all samples, and it does not
detach the reward.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.surrogate import gaussian_kl, gaussian_kl_no_dt, ppo_clip
from flowalign.functional.transition import Gaussian, Kernel, log_density, per_row
from flowalign.losses.policy_gradient.grpo import ratio_stats
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import STEPS, Loss
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class OPD(MatchingLoss):
    """Mean of weight * (distance to the teacher + anchor * distance to the reference) over rows.

    Distances are KL divergences of stochastic steps from the states that the student visited. `SFT`
    regresses on the teacher's velocity. It has the same minimum and needs no stochastic steps.
    """

    paired, velocity = False, True

    form: Literal["released", "policy_gradient", "sampled"] = "released"
    """Form of the distance to the teacher. released: the KL, without the step length in the
    denominator, as in mode gkd of the released code. policy_gradient: the paper's form, which uses
    minus the detached KL as the reward of a step. This reward does not depend on the drawn noise,
    so its expected gradient is 0. sampled: our choice, which uses the log-ratio of teacher and
    student for the sampled step as reward. Its expected gradient equals that of minus the KL."""
    anchor: NonNegativeFloat = 0.04
    """Weight of the KL to the reference (MAR). In the paper the reference is a teacher for image
    quality, in the code's default it is the initial model. 0: none."""
    clip: PositiveFloat = 1e-3
    """Clip range of the ratio in the forms policy_gradient and sampled."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return stochastic steps from visited states and, for the anchor, the reference."""
        return STEPS | ({"reference"} if self.anchor else set())

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        divergence = self._kl(batch["policy"], batch)
        stats = {"teacher_kl": divergence.detach().mean()}
        if self.form == "released":
            each = divergence
        else:
            target, kernel = batch["target"], context.kernel
            logp = _logp(batch["policy"] + target, batch, kernel)
            reward = -divergence
            if self.form == "sampled":
                reward = _logp(target, batch, kernel) - logp
            log_ratio = logp - batch["logp_old"]
            each = ppo_clip(log_ratio, reward.detach(), self.clip)
            stats |= ratio_stats(log_ratio.detach(), reward.detach(), self.clip)
        if self.anchor:
            distance = self._kl(batch["policy"] - batch["reference"], batch)
            each = each + self.anchor * distance
            stats["anchor_kl"] = distance.detach().mean()
        return self.mean(batch, each, stats)

    def _kl(self, gap: Float[Tensor, "n *latent"], batch: Batch) -> Float[Tensor, "n"]:
        """Return the KL between two steps with a velocity difference of `gap`."""
        student = _step(gap, batch)
        other = Gaussian(torch.zeros_like(gap), batch["std"])
        if self.form == "released":
            return gaussian_kl_no_dt(student, other, batch["dt"])
        return gaussian_kl(student, other)


def _logp(velocity: Float[Tensor, "n *latent"], batch: Batch, kernel: Kernel) -> Float[Tensor, "n"]:
    """Return the log-density of the sampled steps, averaged over latent elements."""
    reached = _step(batch["travelled"], batch).mean
    return log_density(kernel, reached, _step(velocity, batch))


def _step(velocity: Float[Tensor, "n *latent"], batch: Batch) -> Gaussian:
    """Return the distribution of the steps, without the terms independent of the velocity."""
    return Gaussian(per_row(batch["slope"], velocity) * velocity, batch["std"])

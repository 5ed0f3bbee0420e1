"""Regress implicit rewards, centred within groups, on centred rewards (CRD).

Source: CRD, arXiv:2603.14128, as X-GenGroup/Flow-Factory implements it. There means are over
whatever rows a micro-batch holds; here over groups, which is the method's own definition.
"""

from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.forward_process import (
    adaptive_weight,
    crd,
    group_mean,
    implicit_reward,
    optimality,
)
from flowalign.functional.noise_matching import sample_error
from flowalign.losses.matching.groups import GROUP_ADVANTAGES, gather_groups
from flowalign.losses.matching.links import require_positive
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class CRD(MatchingLoss):
    """Averages weight * (advantage_max * crd + KL) over rows; the KL is to the reference.

    Published: an old policy with start .25 and slope .005 to .999, samples of a second average with
    flat 75 and slope .0075 to .999 (`recipe.behaviour`), and a `GuidedReference`.
    """

    beta: PositiveFloat = 1.0
    """Scale of the implicit rewards."""
    advantage_max: PositiveFloat = 5.0
    """Advantage from which on a sample counts as optimal; also the scale of the loss."""
    form: Literal["mse", "bce"] = "mse"
    """Distance between implicit and given rewards, see `crd`."""
    kl: NonNegativeFloat = 0.1
    """Weight of the mean square between the velocities of policy and reference, of optimal samples;
    0: none."""
    least_kl: NonNegativeFloat = 1e-4
    """That of the worst samples; equal to `kl` it does not depend on the reward."""

    def __post_init__(self) -> None:
        """Reject settings that are not positive, and a range of KL weights that is empty."""
        require_positive(beta=self.beta, advantage_max=self.advantage_max)
        if not (self.kl == 0 or 0 <= self.least_kl <= self.kl):
            raise ValueError(
                f"kl is {self.kl} and least_kl {self.least_kl}; need 0 <= least_kl <= kl, or kl 0"
            )

    @property
    @override
    def requirements(self) -> Requirements:
        """Require advantages, whole groups, the old policy and, for the KL, a reference."""
        return replace(GROUP_ADVANTAGES, reference=self.kl > 0)

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        optimal = optimality(batch.required_advantage, self.advantage_max)
        reward = implicit_reward(residuals.policy, residuals.required_old)
        same, (rewards, optimals) = gather_groups(batch, context, reward, optimal)
        implicit = reward - group_mean(rewards, same)
        target = optimal - group_mean(optimals, same)
        each = self.advantage_max * crd(implicit, target, self.beta, self.form)
        stats = {
            "error": sample_error(residuals.policy.detach()).mean(),
            "implicit_reward_size": implicit.detach().abs().mean(),
            "implicit_accuracy": (implicit.detach() * target > 0).float().mean(),
        }
        if self.kl:
            distance = sample_error(residuals.policy - residuals.required_reference)
            each = each + self._kl_weight(optimal) * distance
            stats["reference_distance"] = distance.detach().mean()
        loss = (batch.weight * each).mean()
        return loss, stats | {"policy_loss": loss.detach()}

    def _kl_weight(self, optimal: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return adaptive_weight(optimal, self.kl, self.least_kl)

"""Match targets between old policy and sample, weighted by a softmax over the group (FlowAWR).

Source: FlowAWR, arXiv:2606.30376, as described in the documentation of a reproduction.
"""

from dataclasses import dataclass

from typing_extensions import override

from flowalign.functional.forward_process import advantage_weighted_regression, softmax_advantage
from flowalign.functional.noise_matching import sample_error
from flowalign.losses.matching.groups import GROUP_ADVANTAGES, gather_groups
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class FlowAWR(MatchingLoss):
    """Mean of weight * advantage_weighted_regression over rows.

    The weights are G softmax(A / temperature) - 1 within each group of G. The reproduction divides
    advantages by the batch standard deviation, adds `recipe.kl` 1e-4, and samples from the old
    policy, with decay slope 0.001 up to 0.5.
    """

    temperature: PositiveFloat = 1.0
    """Temperature in units of the advantage. At low temperatures the best sample's weight
    approaches G - 1."""

    @property
    @override
    def requirements(self) -> Requirements:
        """Require advantages, whole groups and the old policy."""
        return GROUP_ADVANTAGES

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        advantage = batch.required_advantage
        same, (all_advantages,) = gather_groups(batch, context, advantage)
        weight = softmax_advantage(advantage, all_advantages, same, self.temperature)
        each = advantage_weighted_regression(residuals.policy, residuals.required_old, weight)
        loss = (batch.weight * each).mean()
        return loss, {
            "policy_loss": loss.detach(),
            "error": sample_error(residuals.policy.detach()).mean(),
            "weight_size": weight.abs().mean(),
        }

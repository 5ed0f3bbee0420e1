"""Match targets that the advantage moves from the reference towards the sample (RAM).

Source: Reward-Adjusted Matching, arXiv:2605.10759, reconstructed from three secondary sources. We
have not read its code.
"""

from dataclasses import dataclass

from typing_extensions import override

from flowalign.functional.forward_process import reward_adjusted_matching
from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class RAM(MatchingLoss):
    """Mean of weight * reward_adjusted over rows: AWM with a built-in anchor to the base model."""

    eta: PositiveFloat = 1.0
    """Strength of the reward, the inverse of a KL weight. The default is our choice, because we do
    not know the published value."""

    @property
    @override
    def requirements(self) -> Requirements:
        """Require advantages and a reference; the value depends on the errors."""
        return Requirements(paired=False, velocity=True, requires={"advantages"})

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        reference = residuals.required_reference
        each = reward_adjusted_matching(
            residuals.policy, reference, batch.required_advantage, self.eta
        )
        loss = (batch.weight * each).mean()
        return loss, {
            "policy_loss": loss.detach(),
            "error": sample_error(residuals.policy.detach()).mean(),
        }

"""Match samples weighted by softly clipped advantages, with shared noise per group (V-GRPO).

Source: V-GRPO, arXiv:2604.23380, reconstructed from secondary sources. We have not read its code.
"""

from dataclasses import dataclass

from typing_extensions import override

from flowalign.functional.forward_process import negative_elbo, soft_clip
from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class VGRPO(MatchingLoss):
    """Mean of -weight * r * eta tanh(A / eta) over rows.

    r is the policy's likelihood ratio to itself, with value 1. The paper makes one update per
    training step, for which this is exact. The log-likelihood is minus the self-normalised error of
    x0.
    """

    eta: PositiveFloat = 3.0
    """Bound of the advantage, which tanh approaches."""

    @property
    @override
    def requirements(self) -> Requirements:
        """Require advantages, and shared noise for all rows of a group."""
        return Requirements(
            reference=False, paired=False, velocity=True, shared_noise=True, requires={"advantages"}
        )

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        energy = negative_elbo(residuals.policy, residuals.required_sigma, "self_normalised")
        ratio = (energy.detach() - energy).exp()
        each = -ratio * soft_clip(batch.required_advantage, self.eta)
        loss = (batch.weight * each).mean()
        return loss, {
            "policy_loss": loss.detach(),
            "error": sample_error(residuals.policy.detach()).mean(),
        }

"""Keep the norm of predictions from exceeding the reference's norm (NormGuard).

Source: NormGuard, arXiv:2606.27771, implemented from the abstract only. It adds a hinge to the loss
that is active if ||v|| > ||v_ref||. The form and the numbers are a reconstruction.
"""

from dataclasses import dataclass, replace
from typing import Literal

from typing_extensions import override

from flowalign.functional.forward_process import norm_hinge, norm_ratio
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class NormGuard(MatchingLoss):
    """Wrapper that adds the mean of weight * max(0, ||v|| / ||v_ref|| - 1)^power over rows.

    Growing norms accompany over-saturated images. The wrapper uses the reference of the recipe and
    evaluates it even if the inner loss does not.
    """

    inner: MatchingLoss
    weight: PositiveFloat = 1.0
    """Weight of the hinge. The default is our choice."""
    power: Literal[1, 2] = 2
    """Power of the hinge. The default is our choice."""

    @property
    @override
    def requirements(self) -> Requirements:
        """Return the requirements of the inner loss plus a reference; the hinge starts at 0."""
        return replace(self.inner.requirements, reference=True, velocity=True)

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the sum of the inner loss and the hinge, and scalars for the log."""
        target = residuals.required_target
        reference = residuals.required_reference + target
        hinge = norm_hinge(norm_ratio(residuals.policy + target, reference), self.power)
        loss, stats = self.inner.loss(residuals, batch, context)
        total = loss + self.weight * (batch.weight * hinge).mean()
        return total, stats | {
            "policy_loss": total.detach(),
            "norm_hinge": hinge.detach().mean(),
        }

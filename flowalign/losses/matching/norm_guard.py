"""Keep the norm of predictions from growing beyond the reference's (NormGuard).

Source: NormGuard, arXiv:2606.27771, of which we know the abstract: a hinge, added to the loss, that
acts where ||v|| > ||v_ref||. Its form here is a reconstruction, and so are all its numbers.
"""

from dataclasses import dataclass, replace
from typing import Literal

from typing_extensions import override

from flowalign.functional.forward_process import norm_hinge, norm_ratio
from flowalign.losses.matching.links import require_positive
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class NormGuard(MatchingLoss):
    """Wraps a loss: adds weight * max(0, ||v|| / ||v_ref|| - 1)^power, a mean over rows.

    Growing norms go with over-saturated pictures. The reference is that of the recipe, evaluated
    for this if for nothing else.
    """

    inner: MatchingLoss
    weight: PositiveFloat = 1.0
    """Weight of the hinge; ours."""
    power: Literal[1, 2] = 2
    """Power of the hinge; ours."""

    def __post_init__(self) -> None:
        """Reject a weight that is not positive."""
        require_positive(weight=self.weight)

    @property
    @override
    def requirements(self) -> Requirements:
        """Return those of the inner loss, with a reference; at the start the hinge is 0."""
        return replace(self.inner.requirements, reference=True, velocity=True)

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the inner loss and the hinge, and scalars for the log."""
        target = residuals.required_target
        reference = residuals.required_reference + target
        hinge = norm_hinge(norm_ratio(residuals.policy + target, reference), self.power)
        loss, stats = self.inner.loss(residuals, batch, context)
        total = loss + self.weight * (batch.weight * hinge).mean()
        return total, stats | {
            "policy_loss": total.detach(),
            "norm_hinge": hinge.detach().mean(),
        }

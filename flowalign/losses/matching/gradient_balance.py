"""Limit the gradient of the loser to the length of the winner's gradient (CPO).

Source: CPO, arXiv:2601.04300, which balances the gradients of winner and loser. Its exact rule was
not available to us, so this one is a reconstruction.
"""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from flowalign.functional.preference_loss import balancing_scale, scale_row_gradients
from flowalign.losses.matching.inner_loss import require_pairs
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss


@dataclass(frozen=True, kw_only=True)
class GradientBalance(MatchingLoss):
    """Wrapper of a pair loss that scales down the gradient on losers and keeps the value.

    It is meant for pairs of one latent with two targets. Without it, a policy that has reached the
    winner's target is still pushed away from the loser's target and overshoots.
    """

    inner: MatchingLoss

    def __post_init__(self) -> None:
        """Reject an inner loss that does not compare pairs."""
        require_pairs(self.inner)

    @property
    @override
    def requirements(self) -> Requirements:
        """Return the requirements of the inner loss."""
        return self.inner.requirements

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the inner loss, and its scalars for the log plus the mean scale of losers."""
        winner, loser = residuals.policy.chunk(2)
        scale = balancing_scale(winner, loser)
        balanced = torch.cat([winner, scale_row_gradients(loser, scale)])
        loss, stats = self.inner.loss(replace(residuals, policy=balanced), batch, context)
        return loss, stats | {"loser_scale": scale.mean()}

"""Let the push away from losers be no longer than the pull towards winners (CPO).

Source: CPO, arXiv:2601.04300, which balances the gradients of winner and loser. Its rule could not
be read: a reconstruction.
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
    """Wraps a loss of pairs: the value stays the same, the gradient on losers is scaled down.

    Meant for pairs of one latent with two targets. There a policy that has met the winner's target
    would otherwise still be pushed away from the loser's, past it.
    """

    inner: MatchingLoss

    def __post_init__(self) -> None:
        """Reject an inner loss that has no pairs."""
        require_pairs(self.inner)

    @property
    @override
    def requirements(self) -> Requirements:
        """Return those of the inner loss."""
        return self.inner.requirements

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the inner loss, and its scalars for the log with the mean scale of losers."""
        winner, loser = residuals.policy.chunk(2)
        scale = balancing_scale(winner, loser)
        balanced = torch.cat([winner, scale_row_gradients(loser, scale)])
        loss, stats = self.inner.loss(replace(residuals, policy=balanced), batch, context)
        return loss, stats | {"loser_scale": scale.mean()}

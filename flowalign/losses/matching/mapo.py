"""Train on preference pairs without a reference (MaPO).

Source: MaPO, arXiv:2406.06424, and code of mapo-t2i/mapo.
"""

from dataclasses import dataclass

from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.preference_loss import mapo, mapo_margin
from flowalign.losses.matching.links import error_stats
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class MaPO(MatchingLoss):
    """Mean of weight * mapo over pairs: fine-tuning on winners, plus a margin over the losers.

    At the published scale the margin saturates early and only fine-tuning on winners remains. With
    errors 0.5 and 0.6, for example, the margin's gradient is 3e-9 of the winner's. The margin only
    affects pairs with an error difference below about 0.02 and pairs in the wrong order. Without a
    reference, half of DPO's network evaluations are saved.
    """

    reads = frozenset()
    beta: PositiveFloat = 0.1
    """Weight of the margin."""
    scale: PositiveFloat = 1000.0
    """Factor on the difference of likelihoods. Lower values also affect pairs with larger error
    differences. Published: 1000."""
    s: PositiveFloat = 0.5
    """Rate at which the likelihood falls with the error, see `mapo_likelihood`."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over the pairs, and detached scalars for the log.

        `margin_pull` is sigmoid(-margin), the remaining share of the margin's gradient.
        """
        policy = sample_error(batch["policy"])
        each = mapo(policy, self.beta, self.scale, self.s)
        margin = mapo_margin(policy.detach(), self.scale, self.s)
        stats = {
            "margin": margin.mean(),
            "margin_pull": (-margin).sigmoid().mean(),
            "ranking_accuracy": (margin > 0).float().mean(),
        }
        return self.mean(batch, each, error_stats(policy) | stats)

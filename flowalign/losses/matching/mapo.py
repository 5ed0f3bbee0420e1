"""MaPO: preferences without a reference.

Source: MaPO, arXiv:2406.06424, and code of mapo-t2i/mapo.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from flowalign.functional.matching import sample_error
from flowalign.functional.preference_loss import mapo, mapo_margin
from flowalign.losses.matching.links import error_stats, require_positive
from flowalign.types import Errors, Examples, MatchingLoss, Traits


@dataclass(frozen=True, kw_only=True)
class MaPO(MatchingLoss):
    """Mean over pairs of weight * mapo: fine-tuning on winners, plus a margin over the losers.

    At the published scale the margin is soon satisfied: with errors 0.5 and 0.6 its gradient is
    3e-9 of the winner's own, and what is left is fine-tuning on winners. It acts on pairs whose
    errors differ by less than about 0.02, and on those that are in wrong order.
    """

    beta: float = 0.1
    """Weight of the margin."""
    scale: float = 1000.0
    """Of the margin, theirs. Lower ones reach pairs that lie further apart."""
    s: float = 0.5
    """How fast likelihood falls with the error, see `mapo_likelihood`."""

    def __post_init__(self) -> None:
        """Refuse what prefers nothing."""
        require_positive(beta=self.beta, scale=self.scale, s=self.s)

    @property
    @override
    def traits(self) -> Traits:
        """Half the evaluations of DPO."""
        return Traits(reference=False)

    @override
    def loss(self, errors: Errors, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the pairs, and detached scalars for the log.

        `margin_pull` is sigmoid(-margin), how much of the margin's gradient is left.
        """
        policy = sample_error(errors.policy)
        each = mapo(policy, self.beta, self.scale, self.s)
        loss = (batch.weight.chunk(2)[0] * each).mean()
        margin = mapo_margin(policy.detach(), self.scale, self.s)
        return loss, error_stats(policy) | {
            "policy_loss": loss.detach(),
            "margin": margin.mean(),
            "margin_pull": (-margin).sigmoid().mean(),
            "ranking_accuracy": (margin > 0).float().mean(),
        }

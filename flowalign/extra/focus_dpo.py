"""Train on pairs with errors weighted towards the subject of the prompt (FocusDPO).

Source: FocusDPO, arXiv:2509.01181, a reconstruction because its weights are not published.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from typing_extensions import override

from flowalign.functional.noise_matching import masked_error
from flowalign.functional.preference_loss import implicit_margin, relative_gap
from flowalign.functional.resizing import focus_weights
from flowalign.losses.matching.links import Link, Sigmoid, pair_stats
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import PositiveFloat, PositiveInt, UnitInterval


@dataclass(frozen=True, kw_only=True)
class FocusDPO(MatchingLoss):
    """Mean of weight * link(margin) over pairs, with spatially weighted errors.

    The mask of a row gives the probability that each latent position shows the subject of the
    request, for example from `reward_models.SubjectFocus`. `focus_weights` turns it into weights
    that depend on the noise level.

    Source: FocusDPO, arXiv:2509.01181, a reconstruction.
    """

    beta: PositiveFloat = 5000.0
    floor: UnitInterval = 0.2
    """Weight of latent positions outside the subject, relative to the largest weight. 1: plain
    DPO."""
    window: PositiveInt = 5
    """Side of the square over which the weights are averaged at pure noise, an odd number of latent
    positions."""
    link: Link = field(default_factory=Sigmoid)
    """Loss of the margin. Default: DPO's sigmoid."""

    def __post_init__(self) -> None:
        """Reject an even window."""
        super().__post_init__()
        if self.window % 2 == 0:
            raise ValueError(f"window is {self.window}; it must be odd, to have a centre")

    @property
    @override
    def needs(self) -> Set[str]:
        """Return the reference and the region of the subject."""
        return {"reference", "region"}

    @property
    @override
    def at_start(self) -> float:
        return self.link.at_start

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        weights = focus_weights(batch["region"], batch["sigma"], self.floor, self.window)
        policy = masked_error(batch["policy"], weights)
        reference = masked_error(batch["reference"], weights)
        margin = implicit_margin(relative_gap(policy, reference), self.beta)
        loss = (batch["weight"].chunk(2)[0] * self.link.loss(margin)).mean()
        return loss, pair_stats(policy, reference, self.beta) | {
            "policy_loss": loss.detach(),
            "focus": weights.flatten(1).amax(1).mean(),
        }

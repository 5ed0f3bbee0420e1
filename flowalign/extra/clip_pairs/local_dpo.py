"""Train on pairs of a winner and a copy of it that is corrupted inside a mask (Local-DPO).

Source: Local-DPO, arXiv:2601.04068, and its code. Here each row is normalised by its own mask. The
released code divides by the mask of the whole batch.
"""

from collections.abc import Set
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import masked_error, sample_error
from flowalign.functional.preference_loss import implicit_margin, relative_gap, sigmoid_link
from flowalign.losses.matching.links import pair_stats
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class LocalDPO(MatchingLoss):
    """Mean of weight * (DPO + DPO in the mask + sft (l_w + l_w in the mask)) over pairs.

    The error inside the mask does not depend on the mask's size, see `masked_error`.
    """

    beta: PositiveFloat = 5000.0
    sft: NonNegativeFloat = 0.1
    """Weight of the winner's error. 0: none."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return the reference and the region; errors of winners raise the loss at the start."""
        return {"reference", "region", "region_strength"}

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        policy, reference = batch["policy"], batch["reference"]
        everywhere = sample_error(policy), sample_error(reference)
        region, strength = batch["region"], batch["region_strength"]
        inside = (
            strength * masked_error(policy, region),
            strength * masked_error(reference, region),
        )
        each = self._part(*everywhere) + self._part(*inside)
        loss = (batch["weight"].chunk(2)[0] * each).mean()
        masked = pair_stats(*inside, self.beta)
        return loss, pair_stats(*everywhere, self.beta) | {
            "policy_loss": loss.detach(),
            "masked_accuracy": masked["implicit_accuracy"],
            "masked_margin": masked["margin"],
        }

    def _part(
        self, policy: Float[Tensor, "n"], reference: Float[Tensor, "n"]
    ) -> Float[Tensor, "m"]:
        z = implicit_margin(relative_gap(policy, reference), self.beta)
        return sigmoid_link(z) + self.sft * policy.chunk(2)[0]

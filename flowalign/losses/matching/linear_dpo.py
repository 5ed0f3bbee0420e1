"""Train on pairs weighted linearly in the gap, instead of DPO's sigmoid (Linear-DPO).

Source: Linear-DPO, arXiv:2605.21123, and code of WhynotChen0105/Linear-DPO.
"""

from dataclasses import dataclass
from typing import Annotated

from typing_extensions import override

from flowalign.functional.preference_loss import linear_dpo, linear_weight, relative_gap
from flowalign.losses.matching.links import pair_stats, sample_errors
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import PositiveFloat, Range


@dataclass(frozen=True, kw_only=True)
class LinearDPO(MatchingLoss):
    """Mean of weight * linear_dpo over pairs, meant for an EMA reference that follows the policy.

    The value is a weighted difference of errors. It is negative if the winner's error is smaller.
    """

    beta: PositiveFloat = 100.0
    """Slope of the pair weight in the gap. Published: 100 (SD1.5), 500 (SDXL)."""
    floor: Annotated[float, Range(least=0, below=0.5)] = 1e-3
    """Smallest weight of a pair. The largest is 1 - floor. Published: 0.001 (SD1.5), 0 (SDXL)."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        policy, reference = sample_errors(batch)
        each = linear_dpo(policy, reference, self.beta, self.floor)
        gap = relative_gap(policy.detach(), reference)
        stats = pair_stats(policy, reference, self.beta)
        stats["linear_weight"] = linear_weight(gap, self.beta, self.floor).mean()
        return self.mean(batch, each, stats)

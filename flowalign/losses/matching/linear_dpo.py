"""Linear-DPO: the weight of a pair falls in a straight line where DPO's is a sigmoid.

Source: Linear-DPO, arXiv:2605.21123, and code of WhynotChen0105/Linear-DPO.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from flowalign.functional.matching import sample_error
from flowalign.functional.preference_loss import linear_dpo, linear_weight, relative_gap
from flowalign.losses.matching.links import pair_stats, require_positive
from flowalign.types import Errors, Examples, MatchingLoss, Traits


@dataclass(frozen=True, kw_only=True)
class LinearDPO(MatchingLoss):
    """Mean over pairs of weight * linear_dpo. Meant for a reference that follows the policy (EMA).

    The value is a weighted difference of errors, below 0 where the winner's is smaller.
    """

    beta: float = 100.0
    """Their SD1.5: 100; SDXL: 500."""
    floor: float = 1e-3
    """The least a pair counts, of at most 1 - floor. Their SD1.5: 0.001; SDXL: 0."""

    def __post_init__(self) -> None:
        """Refuse weights that are none."""
        require_positive(beta=self.beta)
        if not 0 <= self.floor < 0.5:
            raise ValueError(f"floor is {self.floor}; it must lie in [0, 0.5)")

    @property
    @override
    def traits(self) -> Traits:
        """At the start half of l_w - l_l, which depends on the data."""
        return Traits()

    @override
    def loss(self, errors: Errors, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the pairs, and detached scalars for the log."""
        policy, reference = sample_error(errors.policy), sample_error(errors.required_reference)
        each = linear_dpo(policy, reference, self.beta, self.floor)
        loss = (batch.weight.chunk(2)[0] * each).mean()
        gap = relative_gap(policy.detach(), reference)
        return loss, pair_stats(policy, reference, self.beta) | {
            "policy_loss": loss.detach(),
            "linear_weight": linear_weight(gap, self.beta, self.floor).mean(),
        }

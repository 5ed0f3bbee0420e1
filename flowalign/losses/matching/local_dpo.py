"""Local-DPO: the loser is the winner, made worse inside a mask.

Source: Local-DPO, arXiv:2601.04068, and its code; each row's mask counts for itself, where theirs
divides by the mask of the whole batch.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.matching import masked_error, sample_error
from flowalign.functional.preference_loss import implicit_margin, relative_gap, sigmoid_link
from flowalign.losses.matching.links import pair_stats, require_positive
from flowalign.types import Errors, Examples, MatchingLoss, Traits


@dataclass(frozen=True, kw_only=True)
class LocalDPO(MatchingLoss):
    """Mean over pairs of weight * (DPO everywhere + DPO in the mask + sft (l_w + l_w in the mask)).

    The mask's share of an error does not depend on the mask's size, see `masked_error`.
    """

    beta: float = 5000.0
    sft: float = 0.1
    """Weight of fitting the winner; 0: none."""

    def __post_init__(self) -> None:
        """Refuse what prefers nothing."""
        require_positive(beta=self.beta)
        if not self.sft >= 0:
            raise ValueError(f"sft is {self.sft}; it must be at least 0")

    @property
    @override
    def traits(self) -> Traits:
        """At the start twice the logarithm of 2, and the winner's errors."""
        return Traits(needs={"masks"})

    @override
    def loss(self, errors: Errors, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the pairs, and detached scalars for the log."""
        if batch.mask is None:
            raise ValueError("LocalDPO needs pairs with a mask; these have none")
        policy, reference = errors.policy, errors.required_reference
        everywhere = sample_error(policy), sample_error(reference)
        strength = 1.0 if batch.mask_strength is None else batch.mask_strength
        inside = (
            strength * masked_error(policy, batch.mask),
            strength * masked_error(reference, batch.mask),
        )
        each = self._part(*everywhere) + self._part(*inside)
        loss = (batch.weight.chunk(2)[0] * each).mean()
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

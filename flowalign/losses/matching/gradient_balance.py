"""Limit the gradient of the loser to the length of the winner's gradient (CPO).

Source: CPO, arXiv:2601.04300, which balances the gradients of winner and loser. Its exact rule was
not available to us, so this one is a reconstruction.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.preference_loss import balancing_scale
from flowalign.losses.matching.inner_loss import ScaledLosers


@dataclass(frozen=True, kw_only=True)
class GradientBalance(ScaledLosers):
    """Wrapper of a pair loss that scales down the gradient on losers and keeps the value.

    It is meant for pairs of one latent with two targets. Without it, a policy that has reached the
    winner's target is still pushed away from the loser's target and overshoots.
    """

    @override
    def scale(
        self, winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"]
    ) -> Float[Tensor, "m"]:
        return balancing_scale(winner, loser)

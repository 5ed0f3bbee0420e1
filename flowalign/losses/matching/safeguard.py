"""Keep the loser's gradient from raising the winner's error (Diffusion-SDPO).

Source: Diffusion-SDPO, arXiv:2511.03317, and code of AIDC-AI/Diffusion-SDPO.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.preference_loss import loser_scale
from flowalign.losses.matching.inner_loss import ScaledLosers
from flowalign.types.ranges import UnitInterval


@dataclass(frozen=True, kw_only=True)
class Safeguard(ScaledLosers):
    """Wrapper of a pair loss that scales down the gradient on losers and keeps the value.

    To first order, a step of the network's output then lowers the winner's error. This holds for
    losses with at least as large a factor on the winner's gradient as on the loser's, such as DPO
    and LinearDPO. With masks or segments, the scale is still computed from whole latents, and the
    loser is still the rejected row.
    """

    mu: UnitInterval = 0.9
    """Smallest share of the winner's descent that must remain. 1: no conflict is allowed. Published
    with DPO: 0.9 (SD1.5), 0.6 (SDXL)."""
    per: Literal["pair", "batch"] = "pair"
    """Scope of the scale. pair: one scale per pair. batch: one scale for all pairs of a process, as
    in the released code."""

    @property
    @override
    def whole_batch(self) -> bool:
        """Return whether there is one scale per batch, or the inner loss needs whole batches."""
        return self.per == "batch" or self.inner.whole_batch

    @override
    def scale(
        self, winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"]
    ) -> Float[Tensor, "m"]:
        if self.per == "pair":
            return loser_scale(winner, loser, self.mu)
        return loser_scale(winner[None], loser[None], self.mu).expand(len(winner))

"""Keep the loser's gradient from raising the winner's error (Diffusion-SDPO).

Source: Diffusion-SDPO, arXiv:2511.03317, and code of AIDC-AI/Diffusion-SDPO.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.preference_loss import loser_scale, scale_row_gradients
from flowalign.losses.matching.inner_loss import require_pairs
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import UnitInterval


@dataclass(frozen=True, kw_only=True)
class Safeguard(MatchingLoss):
    """Wrapper of a pair loss that scales down the gradient on losers and keeps the value.

    To first order, a step of the network's output then lowers the winner's error. This holds for
    losses with at least as large a factor on the winner's gradient as on the loser's, such as DPO
    and LinearDPO. With masks or segments, the scale is still computed from whole latents, and the
    loser is still the rejected row.
    """

    inner: MatchingLoss
    mu: UnitInterval = 0.9
    """Smallest share of the winner's descent that must remain. 1: no conflict is allowed. Published
    with DPO: 0.9 (SD1.5), 0.6 (SDXL)."""
    per: Literal["pair", "batch"] = "pair"
    """Scope of the scale. pair: one scale per pair. batch: one scale for all pairs of a process, as
    in the released code."""

    def __post_init__(self) -> None:
        """Reject an inner loss that does not compare pairs."""
        super().__post_init__()
        require_pairs(self.inner)

    @property
    @override
    def requirements(self) -> Requirements:
        """Return the requirements of the inner loss; one scale per batch needs whole batches."""
        inner = self.inner.requirements
        return replace(inner, whole_batch=self.per == "batch" or inner.whole_batch)

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the inner loss, and its scalars for the log plus the mean scale of losers."""
        winner, loser = residuals.policy.chunk(2)
        scale = self._scale(winner, loser)
        guarded = torch.cat([winner, scale_row_gradients(loser, scale)])
        loss, stats = self.inner.loss(replace(residuals, policy=guarded), batch, context)
        return loss, stats | {"loser_scale": scale.mean()}

    def _scale(
        self, winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"]
    ) -> Float[Tensor, "m"]:
        if self.per == "pair":
            return loser_scale(winner, loser, self.mu)
        return loser_scale(winner[None], loser[None], self.mu).expand(len(winner))

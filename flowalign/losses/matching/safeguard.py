"""Keep the push on the loser from raising the winner's error (Diffusion-SDPO).

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
    """Wraps a loss of pairs: the value stays the same, the gradient on losers is scaled down.

    A step of the network's output then lowers the winner's error, to first order, for every loss
    that pulls the winner at least as hard as it pushes the loser, such as DPO and LinearDPO. Under
    masks or segments the scale is still that of whole latents, and the loser the rejected row.
    """

    inner: MatchingLoss
    mu: UnitInterval = 0.9
    """Smallest share of the winner's own descent that is left; 1 forbids any conflict. Published
    with DPO: 0.9 (SD1.5), 0.6 (SDXL)."""
    per: Literal["pair", "batch"] = "pair"
    """pair: one scale per pair. batch: one scale for all pairs of a process, as in their code."""

    def __post_init__(self) -> None:
        """Reject a mu outside [0, 1] and an inner loss that has no pairs."""
        if not 0 <= self.mu <= 1:
            raise ValueError(f"mu is {self.mu}; it must lie in [0, 1]")
        require_pairs(self.inner)

    @property
    @override
    def requirements(self) -> Requirements:
        """Return those of the inner loss; one scale for all pairs needs whole batches, too."""
        inner = self.inner.requirements
        return replace(inner, whole_batch=self.per == "batch" or inner.whole_batch)

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the inner loss, and its scalars for the log with the mean scale of losers."""
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

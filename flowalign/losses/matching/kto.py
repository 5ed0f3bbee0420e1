"""Diffusion-KTO: media that people liked or disliked, without pairs.

Source: Diffusion-KTO, arXiv:2404.04465, and code of jacklishufan/diffusion-kto.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.matching import sample_error
from flowalign.functional.preference_loss import Utility, kto, kto_baseline
from flowalign.losses.matching.links import require_positive
from flowalign.types import Errors, Examples, MatchingLoss, Traits


@dataclass(frozen=True, kw_only=True)
class KTO(MatchingLoss):
    """Mean over rows of weight * kto, relative to the mean gain over all processes' rows."""

    beta: float = 1000.0
    """Of the whole difference of errors: compares with twice this beta of DPO."""
    utility: Utility = "sigmoid"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what prefers nothing."""
        require_positive(
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    @property
    @override
    def traits(self) -> Traits:
        """Rows with labels, all at once for the baseline; 1 - U(0) where both labels weigh 1."""
        plain = self.utility == "sigmoid" and self.desirable_weight == self.undesirable_weight == 1
        return Traits(
            paired=False, whole_batch=True, needs={"labels"}, at_start=0.5 if plain else None
        )

    @override
    def loss(self, errors: Errors, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the rows, and detached scalars for the log."""
        gain = sample_error(errors.required_reference) - sample_error(errors.policy)
        baseline = kto_baseline(batch.gather(gain))
        each = kto(gain, batch.desirable, baseline, self.beta, self.utility)
        weight = torch.where(batch.desirable, self.desirable_weight, self.undesirable_weight)
        loss = (batch.weight * weight * each).mean()
        return loss, self._stats(gain.detach(), batch.desirable, baseline) | {
            "policy_loss": loss.detach()
        }

    def _stats(
        self, gain: Float[Tensor, "n"], desirable: Bool[Tensor, "n"], baseline: Float[Tensor, ""]
    ) -> dict[str, Tensor]:
        """A margin is above 0 where a row is on its label's side of the baseline."""
        margin = self.beta * torch.where(desirable, gain - baseline, baseline - gain)
        return {
            "baseline": baseline,
            "implicit_accuracy": (margin > 0).float().mean(),
            "margin": margin.mean(),
            "margin_abs": gain.abs().mean(),
            "drift": -gain.mean(),
        }

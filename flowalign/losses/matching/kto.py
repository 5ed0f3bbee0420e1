"""Train on single samples with binary labels, desirable or not (Diffusion-KTO).

Source: Diffusion-KTO, arXiv:2404.04465, and code of jacklishufan/diffusion-kto.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.preference_loss import Utility, kto, kto_baseline
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class KTO(MatchingLoss):
    """Mean of weight * kto over rows, with the mean gain over all processes as baseline."""

    paired = False
    reads = frozenset({"reference", "desirable"})
    beta: PositiveFloat = 1000.0
    """Scale of the full error difference; equals DPO's beta / 2."""
    utility: Utility = "sigmoid"
    desirable_weight: PositiveFloat = 1.0
    undesirable_weight: PositiveFloat = 1.0

    @property
    @override
    def whole_batch(self) -> bool:
        """Return True, for the baseline."""
        return True

    @property
    @override
    def at_start(self) -> float | None:
        """Return 1 - U(0), which is declared only for the sigmoid with both weights 1."""
        plain = self.utility == "sigmoid" and self.desirable_weight == self.undesirable_weight == 1
        return 0.5 if plain else None

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        gain = sample_error(batch["reference"]) - sample_error(batch["policy"])
        baseline = kto_baseline(context.gather(gain))
        each = kto(gain, batch["desirable"], baseline, self.beta, self.utility)
        weight = torch.where(batch["desirable"], self.desirable_weight, self.undesirable_weight)
        gain = gain.detach()
        # A margin is positive if the gain agrees with the label.
        margin = self.beta * torch.where(batch["desirable"], gain - baseline, baseline - gain)
        stats = {
            "baseline": baseline,
            "implicit_accuracy": (margin > 0).float().mean(),
            "margin": margin.mean(),
            "margin_abs": gain.abs().mean(),
            "drift": -gain.mean(),
        }
        return self.mean(batch, weight * each, stats)

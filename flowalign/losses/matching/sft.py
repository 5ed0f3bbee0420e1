"""Fine-tune on the samples that annotators liked (supervised fine-tuning)."""

from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss


@dataclass(frozen=True, kw_only=True)
class SFT(MatchingLoss):
    """Mean of weight * l over rows; undesirable rows, such as losers of pairs, contribute 0."""

    on: Literal["desirable", "all"] = "desirable"
    """Rows to fit. desirable: desirable and unlabelled rows. all: all rows."""

    @property
    @override
    def requirements(self) -> Requirements:
        """Require neither a reference nor pairs nor labels; unlabelled samples are fitted."""
        return Requirements(reference=False, paired=False)

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        error = sample_error(residuals.policy)
        fitted = batch.desirable if self.on == "desirable" else torch.ones_like(batch.desirable)
        loss = (fitted * batch.weight * error).mean()
        return loss, {
            "policy_loss": loss.detach(),
            "error": error.detach().mean(),
            "fitted": fitted.float().mean(),
        }

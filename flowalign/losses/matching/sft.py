"""Supervised fine-tuning on the media that people liked."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.matching import sample_error
from flowalign.types import Errors, Examples, MatchingLoss, Traits


@dataclass(frozen=True, kw_only=True)
class SFT(MatchingLoss):
    """Mean over rows of weight * l, of which undesirable ones, losers of pairs, count as 0."""

    on: Literal["desirable", "all"] = "desirable"
    """all: labels are not looked at."""

    @property
    @override
    def traits(self) -> Traits:
        """A regression; where nobody judged, everything is fitted."""
        return Traits(reference=False, paired=False)

    @override
    def loss(self, errors: Errors, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the rows fitted, and detached scalars for the log."""
        error = sample_error(errors.policy)
        fitted = batch.desirable if self.on == "desirable" else torch.ones_like(batch.desirable)
        loss = (fitted * batch.weight * error).mean()
        return loss, {
            "policy_loss": loss.detach(),
            "error": error.detach().mean(),
            "fitted": fitted.float().mean(),
        }

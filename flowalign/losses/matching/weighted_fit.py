"""Fit single samples with a weight for each row."""

from abc import abstractmethod
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss


class WeightedFit(MatchingLoss):
    """Mean of weight * w * l over rows, where a subclass defines w; it needs no pairs."""

    @abstractmethod
    def weigh(self, batch: Examples) -> tuple[Float[Tensor, "n"], Mapping[str, Tensor]]:
        """Return the weight w of each row, and scalars for the log."""

    @property
    @override
    def requirements(self) -> Requirements:
        """Require neither a reference nor pairs nor labels, because each row has its own weight."""
        return Requirements(reference=False, paired=False)

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        weight, stats = self.weigh(batch)
        error = sample_error(residuals.policy)
        loss = (batch.weight * weight * error).mean()
        return loss, {"policy_loss": loss.detach(), "error": error.detach().mean(), **stats}

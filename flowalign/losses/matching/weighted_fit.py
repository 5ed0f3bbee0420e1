"""Fit single samples with a weight for each row."""

from abc import abstractmethod
from collections.abc import Mapping, Set

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss


class WeightedFit(MatchingLoss):
    """Mean of weight * w * l over rows, where a subclass defines w; it needs no pairs."""

    paired = False

    @abstractmethod
    def weigh(self, batch: Batch) -> tuple[Float[Tensor, "n"], Mapping[str, Tensor]]:
        """Return the weight w of each row, and scalars for the log."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return nothing, because each row has its own weight."""
        return frozenset()

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        weight, stats = self.weigh(batch)
        error = sample_error(batch["policy"])
        loss = (batch["weight"] * weight * error).mean()
        return loss, {"policy_loss": loss.detach(), "error": error.detach().mean(), **stats}

"""Fit single samples with a weight for each row."""

from abc import abstractmethod
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss


class WeightedFit(MatchingLoss):
    """Mean of weight * w * l over rows, where a subclass defines w; it needs no pairs."""

    paired = False
    reads = frozenset()

    @abstractmethod
    def weigh(self, batch: Batch) -> tuple[Float[Tensor, "n"], Mapping[str, Tensor]]:
        """Return the weight w of each row, and scalars for the log."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        weight, stats = self.weigh(batch)
        error = sample_error(batch["policy"])
        return self.mean(batch, weight * error, {"error": error.detach().mean(), **stats})

"""Wrap a pair loss."""

from abc import abstractmethod
from collections.abc import Set
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.preference_loss import scale_row_gradients
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss


@dataclass(frozen=True, kw_only=True)
class ScaledLosers(MatchingLoss):
    """Wrapper of a pair loss that scales the gradient on losers and keeps the value."""

    inner: MatchingLoss

    def __post_init__(self) -> None:
        """Reject an inner loss that does not compare pairs."""
        super().__post_init__()
        if not self.inner.paired:
            raise ValueError(
                f"inner is {type(self.inner).__name__}, which does not compare pairs; choose a "
                "pair loss such as DPO"
            )

    @property
    @override
    def needs(self) -> Set[str]:
        return self.inner.needs

    @property
    @override
    def whole_batch(self) -> bool:
        return self.inner.whole_batch

    @property
    @override
    def at_start(self) -> float | None:
        return self.inner.at_start

    @abstractmethod
    def scale(
        self, winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"]
    ) -> Float[Tensor, "m"]:
        """Return the factor on the gradient of each loser, from the residuals of the policy."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the inner loss, and its scalars for the log plus the mean scale of losers."""
        winner, loser = batch["policy"].chunk(2)
        scale = self.scale(winner, loser)
        scaled = torch.cat([winner, scale_row_gradients(loser, scale)])
        loss, stats = self.inner.loss(batch.with_columns(policy=scaled), context)
        return loss, stats | {"loser_scale": scale.mean()}

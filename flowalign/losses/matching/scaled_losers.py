"""Wrap a pair loss and scale the gradient on its losers (CPO, Diffusion-SDPO)."""

from abc import abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.preference_loss import balancing_scale, loser_scale, scale_row_gradients
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import UnitInterval


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


@dataclass(frozen=True, kw_only=True)
class GradientBalance(ScaledLosers):
    """Wrapper of a pair loss that scales down the gradient on losers and keeps the value.

    It is meant for pairs of one latent with two targets. Without it, a policy that has reached the
    winner's target is still pushed away from the loser's target and overshoots.

    Source: CPO, arXiv:2601.04300, which balances the gradients of winner and loser. Its exact rule
    was not available to us, so this one is a reconstruction.
    """

    @override
    def scale(
        self, winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"]
    ) -> Float[Tensor, "m"]:
        return balancing_scale(winner, loser)


@dataclass(frozen=True, kw_only=True)
class Safeguard(ScaledLosers):
    """Wrapper of a pair loss that keeps the loser's gradient from raising the winner's error.

    It scales down the gradient on losers and keeps the value. To first order, a step of the
    network's output then lowers the winner's error. This holds for losses with at least as large a
    factor on the winner's gradient as on the loser's, such as DPO and LinearDPO. With masks or
    segments, the scale is still computed from whole latents, and the loser is still the rejected
    row.

    Source: Diffusion-SDPO, arXiv:2511.03317, and code of AIDC-AI/Diffusion-SDPO.
    """

    mu: UnitInterval = 0.9
    """Smallest share of the winner's descent that must remain. 1: no conflict is allowed. Published
    with DPO: 0.9 (SD1.5), 0.6 (SDXL)."""
    per: Literal["pair", "batch"] = "pair"
    """Scope of the scale. pair: one scale per pair. batch: one scale for all pairs of a process, as
    in the released code."""

    @property
    @override
    def whole_batch(self) -> bool:
        """Return whether there is one scale per batch, or the inner loss needs whole batches."""
        return self.per == "batch" or self.inner.whole_batch

    @override
    def scale(
        self, winner: Float[Tensor, "m *latent"], loser: Float[Tensor, "m *latent"]
    ) -> Float[Tensor, "m"]:
        if self.per == "pair":
            return loser_scale(winner, loser, self.mu)
        return loser_scale(winner[None], loser[None], self.mu).expand(len(winner))

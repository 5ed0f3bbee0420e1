"""Fit single samples with a weight for each row (SFT, RWR)."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.preference_loss import exponential_weight, weighted_score
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import FiniteFloat, PositiveFloat


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


@dataclass(frozen=True, kw_only=True)
class SFT(WeightedFit):
    """Mean of weight * l over rows; undesirable rows, such as losers of pairs, contribute 0.

    This is supervised fine-tuning on the samples that annotators liked.
    """

    on: Literal["desirable", "all"] = "desirable"
    """Rows to fit. desirable: desirable and unlabelled rows. all: all rows."""

    @override
    def weigh(self, batch: Batch) -> tuple[Float[Tensor, "n"], Mapping[str, Tensor]]:
        every = torch.ones_like(batch["weight"], dtype=torch.bool)
        fitted = batch.get("desirable", every) if self.on == "desirable" else every
        return fitted.float(), {"fitted": fitted.float().mean()}


@dataclass(frozen=True, kw_only=True)
class RWR(WeightedFit):
    """Mean of weight * min(exp(r / temperature), cap) * l over rows, r a weighted sum of scores.

    A row with an unknown score has weight 0 and is counted in `reward_unknown`.

    Source: Flow-RWR, arXiv:2501.13918: exp(r) |v - v_theta|^2, with equal weight at all times.
    """

    reads = frozenset({"scores"})
    rewards: Mapping[str, FiniteFloat]
    """Weight of each reward dimension."""
    temperature: PositiveFloat = 1.0
    """Temperature in units of the reward. Lower values give the best rows more weight."""
    cap: PositiveFloat = 20.0
    """Upper bound of the exponential, in units of the weight of reward 0. The default is our
    choice."""

    def __post_init__(self) -> None:
        """Reject empty rewards."""
        super().__post_init__()
        if not self.rewards:
            raise ValueError("rewards is empty; name at least one score dimension and its weight")

    @override
    def weigh(self, batch: Batch) -> tuple[Float[Tensor, "n"], Mapping[str, Tensor]]:
        reward = weighted_score(batch["scores"], self.rewards)
        known = reward.isfinite()
        raw = exponential_weight(reward, self.temperature, self.cap)
        weight = torch.where(known, raw, 0.0)
        return weight, {
            "reward_weight": weight.mean(),
            "reward_capped": (weight >= self.cap).float().mean(),
            "reward_unknown": (~known).float().mean(),
        }

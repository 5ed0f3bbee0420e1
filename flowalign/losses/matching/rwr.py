"""Fit samples with a weight that grows exponentially with their reward (RWR).

Source: Flow-RWR, arXiv:2501.13918: exp(r) |v - v_theta|^2, with equal weight at all times.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.preference_loss import exponential_weight, weighted_score
from flowalign.losses.matching.weighted_fit import WeightedFit
from flowalign.types import Batch
from flowalign.types.ranges import FiniteFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class RWR(WeightedFit):
    """Mean of weight * min(exp(r / temperature), cap) * l over rows, r a weighted sum of scores.

    A row with an unknown score has weight 0 and is counted in `reward_unknown`.
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

"""Regress implicit rewards, centred within groups, on centred rewards (CRD).

Source: CRD, arXiv:2603.14128, as implemented in X-GenGroup/Flow-Factory. That code centres over the
rows of a micro-batch. Here rewards are centred over groups, as the paper defines it.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from flowalign.functional.forward_process import (
    adaptive_weight,
    centring_weights,
    crd,
    implicit_reward,
    optimality,
)
from flowalign.functional.noise_matching import sample_error
from flowalign.losses.matching.groups import GROUP_ADVANTAGE, gather_groups
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class CRD(MatchingLoss):
    """Mean of weight * (advantage_max * crd + KL to the reference) over rows.

    Published settings: `recipe.old` has decay start 0.25 and slope 0.005 up to 0.999. The samples
    come from a second average (`recipe.behaviour`) with flat 75 and slope 0.0075 up to 0.999. The
    reference is a `GuidedReference`.
    """

    paired, velocity = False, True

    beta: PositiveFloat = 1.0
    """Scale of the implicit rewards."""
    advantage_max: PositiveFloat = 5.0
    """Advantage above which a sample counts as optimal; also the scale of the loss."""
    form: Literal["mse", "bce"] = "mse"
    """Distance between implicit and given rewards, see `crd`."""
    temperature: PositiveFloat | None = None
    """Temperature T of the weights softmax(r / T) and softmax(-r / T) of the two means that rewards
    are centred by; the loss is the mean of both. Null: one unweighted mean, as published. Hard
    selection (`weight_temp: 0` in Flow-Factory) is left out, because its pool of rewards below 0
    is always empty."""
    kl: NonNegativeFloat = 0.1
    """Weight of the mean squared difference between the velocities of policy and reference, for
    optimal samples. 0: none."""
    least_kl: NonNegativeFloat = 1e-4
    """Weight of this term for the worst samples. If it equals `kl`, the weight is independent of
    the reward."""

    def __post_init__(self) -> None:
        """Reject a least_kl above kl."""
        super().__post_init__()
        if self.kl and self.least_kl > self.kl:
            raise ValueError(
                f"kl is {self.kl} and least_kl {self.least_kl}; need least_kl <= kl, or kl 0"
            )

    @property
    @override
    def needs(self) -> Set[str]:
        """Return advantages, groups, the old policy and, for the KL, the reference."""
        return GROUP_ADVANTAGE | ({"reference"} if self.kl else set())

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        optimal = optimality(batch["advantage"], self.advantage_max)
        reward = implicit_reward(batch["policy"], batch["old"])
        same, (rewards, optimals) = gather_groups(batch, context, reward, optimal)
        centred = [
            (reward - weights @ rewards, optimal - weights @ optimals)
            for weights in centring_weights(optimals, same, self.temperature)
        ]
        distances = [crd(*pair, self.beta, self.form) for pair in centred]
        each = self.advantage_max * torch.stack(distances).mean(0)
        implicit, target = (torch.stack(parts).detach() for parts in zip(*centred, strict=True))
        stats = {
            "error": sample_error(batch["policy"].detach()).mean(),
            "implicit_reward_size": implicit.abs().mean(),
            "implicit_accuracy": (implicit * target > 0).float().mean(),
        }
        if self.kl:
            distance = sample_error(batch["policy"] - batch["reference"])
            each = each + adaptive_weight(optimal, self.kl, self.least_kl) * distance
            stats["reference_distance"] = distance.detach().mean()
        return self.mean(batch, each, stats)

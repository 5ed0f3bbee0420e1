"""Compare the samples of groups, which may lie on several processes (DGPO, CRD)."""

from collections.abc import Set
from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.distribution_matching import mask_runaways
from flowalign.functional.forward_process import (
    adaptive_weight,
    centring_weights,
    crd,
    dgpo,
    group_preference,
    implicit_reward,
    mask_outside_clip,
    optimality,
    same_group,
)
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.preference_loss import sigmoid_link
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat


def gather_groups(
    batch: Batch, context: LossContext, *values: Float[Tensor, "n"]
) -> tuple[Bool[Tensor, "n N"], list[Float[Tensor, "N"]]]:
    """Return the mask of rows on all processes in the same group, and their detached values."""
    group = batch["group"]
    # One gather for all columns. float64 represents the integer group ids exactly.
    table = torch.stack([group.double(), *(v.detach().double() for v in values)], 1)
    everyone = context.gather(table).to(group.device)
    columns = [column.to(v) for column, v in zip(everyone.T[1:], values, strict=True)]
    return same_group(group, everyone[:, 0].long()), columns


def require_groups_here(batch: Batch, context: LossContext, loss: str) -> Bool[Tensor, "n n"]:
    """Return the mask of rows in the same group.

    Raises:
        ValueError: A group has rows on other processes.
    """
    group = batch["group"]
    here = same_group(group, group)
    everywhere, _ = gather_groups(batch, context)
    if (here.sum(1) != everywhere.sum(1)).any():
        raise ValueError(
            f"recipe.loss {loss} needs all rows of a group on one process, and some groups are "
            "split between processes: give every process whole groups"
        )
    return here


class GroupAdvantageLoss(MatchingLoss):
    """Loss that weights the samples of whole groups by advantages, relative to the old policy."""

    kl: NonNegativeFloat
    """Weight of the divergence from the reference. 0: none."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return advantages, groups, the old policy and, for the KL, the reference."""
        return {"advantage", "group", "old"} | ({"reference"} if self.kl else set())


@dataclass(frozen=True, kw_only=True)
class DGPO(MatchingLoss):
    """Mean of -weight * log sigmoid(-z) over groups, z = beta mean(A (l - l_ref)).

    The gradient is divided by beta, as in the released code. The rows of a group share their noise
    and time.

    Source: DGPO, arXiv:2510.08425, and code of Luo-Yihong/DGPO.
    """

    paired, velocity, shared_noise = False, True, True

    beta: PositiveFloat = 100.0
    """Sharpness of the preference. Published: 100 (GenEval, text), 10 (PickScore), and 2000 without
    guidance, relative to `old`."""
    clip: PositiveFloat | None = 0.01
    """Bound on exp(l_old - l) - 1 in the advantage's direction. Rows beyond it have no gradient.
    Published: 5e-2 to 1e-5. Null: none."""
    relative_to: Literal["reference", "old"] = "reference"
    """Model of the errors l_ref. reference: the frozen reference. old: `recipe.old`, a fast average
    with decay min(0.3, 0.001 n)."""
    drift: NonNegativeFloat = 0.0
    """Weight of mean (l - l_ref)^2, which keeps errors near the reference's errors. TDM-R1: 0.001;
    DGPO: 0."""
    runaway: PositiveFloat | None = None
    """Largest (l - l_ref)^2 of a row that has moved in the direction of its advantage. Rows beyond
    it have no gradient. TDM-R1: 0.05. Null: none."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return advantages, groups, and the models that errors are compared with."""
        clipped = set() if self.clip is None else {"old"}
        return {"advantage", "group", self.relative_to, *clipped}

    @property
    @override
    def at_start(self) -> float:
        return log(2)

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        advantage, error = batch["advantage"], sample_error(batch["policy"])
        reference = sample_error(batch[self.relative_to])
        change = error.detach() - reference
        same, (changes, advantages) = gather_groups(batch, context, change, advantage)
        preference = group_preference(changes, advantages, same, self.beta)
        stopped = self._mask_moved(batch, error, reference)
        descent = (batch["weight"] * dgpo(error, advantage, preference, stopped)).mean()
        value = (batch["weight"] * sigmoid_link(-preference)).mean()
        # The value comes from the group loss, the gradient from `dgpo`, which works by row.
        loss = value + (descent - descent.detach())
        drift = (batch["weight"] * (error - reference).square()).mean()
        loss = loss + self.drift * drift if self.drift else loss
        return loss, {
            "policy_loss": loss.detach(),
            "drift": drift.detach(),
            "error": error.detach().mean(),
            "margin": -preference.mean(),
            "implicit_accuracy": (preference < 0).float().mean(),
            "clip_fraction": stopped.float().mean(),
        }

    def _mask_moved(self, batch: Batch, error: Tensor, reference: Tensor) -> Tensor:
        """Return True for rows that have moved far enough and get no gradient."""
        advantage = batch["advantage"]
        stopped = torch.zeros_like(advantage, dtype=torch.bool)
        if self.clip is not None:
            old = sample_error(batch["old"])
            stopped = stopped | mask_outside_clip(error, old, advantage, self.clip)
        if self.runaway is not None:
            stopped = stopped | mask_runaways(error, reference, advantage, self.runaway)
        return stopped


@dataclass(frozen=True, kw_only=True)
class CRD(GroupAdvantageLoss):
    """Mean of weight * (advantage_max * crd + KL to the reference) over rows.

    Published settings: `recipe.old` has decay start 0.25 and slope 0.005 up to 0.999. The samples
    come from a second average (`recipe.behaviour`) with flat 75 and slope 0.0075 up to 0.999. The
    reference is a `GuidedReference`.

    Source: CRD, arXiv:2603.14128, as implemented in X-GenGroup/Flow-Factory. That code centres
    over the rows of a micro-batch. Here rewards are centred over groups, as the paper defines it.
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

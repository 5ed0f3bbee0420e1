"""Prefer the better samples of a group over the worse ones (DGPO).

Source: DGPO, arXiv:2510.08425, and code of Luo-Yihong/DGPO.
"""

from collections.abc import Set
from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.distribution_matching import mask_runaways
from flowalign.functional.forward_process import dgpo, group_preference, mask_outside_clip
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.preference_loss import sigmoid_link
from flowalign.losses.matching.groups import gather_groups
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class DGPO(MatchingLoss):
    """Mean of -weight * log sigmoid(-z) over groups, z = beta mean(A (l - l_ref)).

    The gradient is divided by beta, as in the released code. The rows of a group share their noise
    and time.
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

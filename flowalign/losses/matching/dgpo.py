"""Prefer the better samples of a group to the worse ones (DGPO).

Source: DGPO, arXiv:2510.08425, and code of Luo-Yihong/DGPO.
"""

from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.forward_process import dgpo, group_preference, moved_too_far
from flowalign.functional.matching import sample_error
from flowalign.functional.preference_loss import sigmoid_link
from flowalign.losses.matching.groups import gathered
from flowalign.losses.matching.links import require_positive
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.utils.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class DGPO(MatchingLoss):
    """Averages -weight * log sigmoid(-z) over groups, z = beta mean(A (l - l_ref)).

    Its gradient is divided by beta, as in their code. The rows of a group share noise and time.
    """

    beta: PositiveFloat = 100.0
    """Sharpness of the preference. Published: 100 (GenEval, text), 10 (PickScore), and 2000 without
    guidance, relative to `old`."""
    clip: PositiveFloat | None = 0.01
    """Bound on exp(l_old - l) - 1 in the advantage's direction, beyond which a row has no gradient.
    Published: 5e-2 to 1e-5. Null: none."""
    relative_to: Literal["reference", "old"] = "reference"
    """Whose errors are l_ref: the reference's, or those of `recipe.old`, which follows fast: decay
    min(.3, .001 n)."""

    def __post_init__(self) -> None:
        """Reject settings that are not positive."""
        require_positive(beta=self.beta)
        if self.clip is not None:
            require_positive(clip=self.clip)

    @property
    @override
    def requirements(self) -> Requirements:
        """Require advantages and whole groups of one noise; the loss starts at log 2."""
        return Requirements(
            reference=self.relative_to == "reference",
            old=self.clip is not None or self.relative_to == "old",
            paired=False,
            velocity=True,
            whole_groups=True,
            shared_noise=True,
            requires={"advantages"},
            at_start=log(2),
        )

    @override
    def loss(
        self, residuals: Residuals, batch: Examples, context: LossContext = ALONE
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over rows with the gradient of their code, and scalars."""
        base = residuals.required_old if self._from_old else residuals.required_reference
        advantage, error = batch.required_advantage, sample_error(residuals.policy)
        change = error.detach() - sample_error(base)
        same, (changes, advantages) = gathered(batch, context, change, advantage)
        preference = group_preference(changes, advantages, same, self.beta)
        stopped = torch.zeros_like(advantage, dtype=torch.bool)
        if self.clip is not None:
            old = sample_error(residuals.required_old)
            stopped = moved_too_far(error, old, advantage, self.clip)
        descent = (batch.weight * dgpo(error, advantage, preference, stopped)).mean()
        value = (batch.weight * sigmoid_link(-preference)).mean()
        loss = value + (descent - descent.detach())
        return loss, {
            "policy_loss": loss.detach(),
            "error": error.detach().mean(),
            "margin": -preference.mean(),
            "implicit_accuracy": (preference < 0).float().mean(),
            "clip_fraction": stopped.float().mean(),
        }

    @property
    def _from_old(self) -> bool:
        return self.relative_to == "old"

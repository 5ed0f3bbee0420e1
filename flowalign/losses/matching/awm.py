"""Match samples weighted by their advantage (AWM).

Source: AWM, arXiv:2509.25050, and code of scxue/advantage_weighted_matching.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.forward_process import Weighting, negative_elbo
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.surrogate import ppo_clip
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class AWM(MatchingLoss):
    """Mean of weight * max(-r A, -clip(r) A) over rows, plus an anchor to an average of the policy.

    r is the likelihood ratio under `weighting`, one per noise level, and A is the advantage times
    `advantage_scale`. Errors with negative advantages would grow without bound. Two anchors prevent
    this: `anchor_weight`, and `recipe.kl`, published as 0.001 (GenEval) and 0.003 (text).
    """

    paired, velocity = False, True
    weighting: Weighting = "generalised_huber"
    """Function of the error that approximates the negative log-likelihood, see `negative_elbo`."""
    ratio_to: Literal["policy", "old"] = "policy"
    """Denominator of the ratio. policy: the ratio is 1 and only carries the gradient, which is
    exact for the first update of a training step. old: `recipe.old`, for several updates per
    training step with one copy per step."""
    clip: PositiveFloat = 1.0
    """Bound on |r - 1| in the advantage's direction. 1 rarely has an effect."""
    advantage_scale: PositiveFloat = 0.2
    """Factor on the advantages. 0.2 maps advantages clipped at 5 into [-1, 1], as in the paper."""
    anchor_weight: NonNegativeFloat = 1.0
    """Weight of the mean squared difference between the velocities of the policy and
    `recipe.anchor`, a fast average with decay min(0.3, 0.001 n). 0: none."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return advantages, and the old policy and the anchor if the settings use them."""
        used = {"old": self.ratio_to == "old", "anchor": self.anchor_weight > 0}
        return {"advantage", *(name for name, read in used.items() if read)}

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        log_ratio = self._log_ratio(batch)
        advantage = self.advantage_scale * batch["advantage"]
        each = ppo_clip(log_ratio, advantage, self.clip)
        ratio = log_ratio.detach().exp()
        stats = {
            "error": sample_error(batch["policy"].detach()).mean(),
            "ratio": ratio.mean(),
            "clip_fraction": ((ratio - 1) * advantage.sign() > self.clip).float().mean(),
        }
        if self.anchor_weight:
            distance = sample_error(batch["policy"] - batch["anchor"])
            each = each + self.anchor_weight * distance
            stats["anchor_distance"] = distance.detach().mean()
        return self.mean(batch, each, stats)

    def _log_ratio(self, batch: Batch) -> Float[Tensor, "n"]:
        sigma = batch["sigma"]
        energy = negative_elbo(batch["policy"], sigma, self.weighting)
        if self.ratio_to == "policy":
            # The value is 0, a ratio of 1. The expression only carries the gradient.
            return energy.detach() - energy
        with torch.no_grad():
            old = negative_elbo(batch["old"], sigma, self.weighting)
        return old - energy

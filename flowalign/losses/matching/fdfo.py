"""Move the velocities of two noisy trajectories towards the better one (FDFO).

Source: FDFO (finite difference flow optimization), arXiv:2603.12893, from the formulas of its code.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import per_row
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import PositiveFloat

_TINY = 1e-6
"""Added to the mean square that divides a direction, from the code of FDFO."""


def pair_contrast(clean: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
    """Return u = d / (mean d^2 + 1e-6) with half the difference d to the other sample of a pair.

    Rows 2i and 2i + 1 are a pair. For a linear reward and small isotropic differences, the mean of
    (half the difference of rewards) * u is the gradient of the reward.
    """
    first, second = clean[0::2], clean[1::2]
    d = (first - second) / 2
    u = d / per_row(sample_error(d) + _TINY, d)
    return torch.stack([u, -u], 1).flatten(0, 1)


def simple_policy_loss(
    change: Float[Tensor, "n *latent"],
    direction: Float[Tensor, "n *latent"],
    gain: Float[Tensor, "n"],
    clip: float,
) -> Float[Tensor, "n"]:
    """Return -g rho + |g| (rho - 1)^2 / (2 clip) for the gain g.

    rho = exp(mean u^2 - mean (v - v_old + u)^2) for the change v - v_old and the direction u. At
    v = v_old, the gradient in v is 2 g u / D for D elements: velocities point away from data, so
    the policy moves against it, towards better samples.
    """
    ratio = (sample_error(direction) - sample_error(change + direction)).exp()
    return -gain * ratio + gain.abs() / (2 * clip) * (ratio - 1).square()


@dataclass(frozen=True, kw_only=True)
class FDFO(MatchingLoss):
    """Mean of weight * simple_policy_loss over the visited states of pairs of samples.

    It needs `recipe.data.contrast` and advantages of scale none, which are half the difference of
    the rewards. The old policy must be a copy per step.
    """

    paired, velocity = False, True
    reads = frozenset({"advantage", "contrast", "old"})
    clip: PositiveFloat = 0.03
    """Size c of the trust region of rho. Published: 0.03."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        change = batch["policy"] - batch["old"]
        gain, direction = batch["advantage"], batch["contrast"]
        each = simple_policy_loss(change, direction, gain, self.clip)
        return self.mean(batch, each, {"gain": gain.abs().mean()})

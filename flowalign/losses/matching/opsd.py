"""Fit clean predictions that a reward gradient moved up and down (DiffusionOPSD).

Source: DiffusionOPSD, arXiv:2608.24646, and code of worldbench/DiffusionOPSD.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.forward_process import optimality, self_normalised_error
from flowalign.functional.transition import per_row
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import PositiveFloat


def opsd(
    change: Float[Tensor, "n *latent"],
    up: Float[Tensor, "n *latent"],
    down: Float[Tensor, "n *latent"],
    optimal: Float[Tensor, "n"],
    beta: float,
) -> Float[Tensor, "n"]:
    """Return w L(beta c - d+) + (1 - w) L(-beta c - d-) for w = `optimal`.

    c = -sigma (v - v_old) is the change of the clean prediction, d+ and d- (`up`, `down`) are the
    displacements of the targets, and L is the self-normalised error. Unlike NFT, the loss is not
    divided by beta. If c = 0 and d- = -d+, the gradient does not depend on w.
    """
    positive = self_normalised_error(beta * change - up)
    negative = self_normalised_error(-beta * change - down)
    return optimal * positive + (1 - optimal) * negative


@dataclass(frozen=True, kw_only=True)
class OPSD(MatchingLoss):
    """Mean of weight * advantage_max * opsd over rows, at the states of `RewardAscent`.

    The examples are the old policy's clean predictions, so the residual of the policy is v - v_old
    and the loss needs no further evaluation of the old policy.
    """

    paired, velocity = False, True
    reads = frozenset({"advantage", "ascent", "descent"})
    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one, in units of the policy's distance.
    Published: 1, and 0.1 for three rewards."""
    advantage_max: PositiveFloat = 5.0
    """Advantage above which a sample counts as optimal; also the scale of the loss."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        optimal = optimality(batch["advantage"], self.advantage_max)
        change = -per_row(batch["sigma"], batch["policy"]) * batch["policy"]
        up, down = batch["ascent"], batch["descent"]
        each = self.advantage_max * opsd(change, up, down, optimal, self.beta)
        moved = change.detach().flatten(1)
        agreement = (moved * up.flatten(1)).sum(1) / up.flatten(1).square().sum(1).clamp(min=1e-12)
        stats = {"optimality": optimal.mean(), "progress_to_target": agreement.mean()}
        return self.mean(batch, each, stats)

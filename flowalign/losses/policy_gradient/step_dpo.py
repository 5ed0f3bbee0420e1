"""Train on pairs of denoising transitions: the better transition becomes more likely.

Source: SPO, arXiv:2406.04314, and code of RockeyCoss/SPO. SPO ranks siblings with a reward model
for noisy states, and trains only on siblings whose best and worst softmax probabilities differ by
more than 0.3. Here they are ranked by their advantage, from any credit method, and the best and the
worst are trained whenever they differ.
"""

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.preference_loss import step_dpo
from flowalign.functional.transition import log_density
from flowalign.losses.policy_gradient.grpo import ratio_stats
from flowalign.types import Batch, Fields, PolicyLoss, VelocityField
from flowalign.types.losses import Loss
from flowalign.utils.ranges import PositiveFloat, Range, require_ranges


@dataclass(frozen=True, kw_only=True)
class StepDPO(PolicyLoss):
    """Mean of weight * step_dpo over pairs; advantages choose the winner but do not weight it."""

    pairs = True
    beta: PositiveFloat = 10.0
    reference: Literal["reference", "old"] = "reference"
    """Policy that likelihoods are relative to. reference: the frozen model, as in SPO. old: the
    policy that sampled the rollout, which needs no further evaluation."""
    ratio_clip: Annotated[float, Range(above=0, below=1)] = 0.1
    """Largest distance of the likelihood ratio from 1. Transitions beyond it have no gradient.
    SPO: 0.1."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "algorithm")

    @property
    @override
    def needs(self) -> Set[str]:
        """Return nothing if likelihoods are relative to the policy that sampled."""
        return {"reference"} if self.reference == "reference" else frozenset()

    @property
    @override
    def clip(self) -> float:
        return self.ratio_clip

    @override
    def loss(self, fields: Fields, batch: Batch) -> Loss:
        log_ratio = _logp(fields, fields.policy, batch) - self._base(fields, batch)
        clipped = log_ratio.clamp(math.log1p(-self.clip), math.log1p(self.clip))
        winner, loser = clipped.chunk(2)
        loss = (batch["weight"].chunk(2)[0] * step_dpo(winner, loser, self.beta)).mean()
        margin = (winner - loser).detach()
        return loss, ratio_stats(log_ratio.detach(), batch["advantage"], self.clip) | {
            "policy_loss": loss.detach(),
            "pair_margin": self.beta * margin.mean(),
            "pair_accuracy": (margin > 0).float().mean(),
        }

    def _base(self, fields: Fields, batch: Batch) -> Float[Tensor, "n"]:
        if self.reference == "old":
            return batch["logp_old"]
        with torch.no_grad():
            return _logp(fields, fields.reference, batch)


def _logp(fields: Fields, field: VelocityField, batch: Batch) -> Float[Tensor, "n"]:
    return log_density(fields.kernel, batch["x_next"].float(), fields.transition(field, batch))

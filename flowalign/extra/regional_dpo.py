"""Train on pairs that differ in segments, inside a mask, or on the subject of the prompt."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import frame_error, masked_error, sample_error
from flowalign.functional.preference_loss import (
    implicit_margin,
    relative_gap,
    segment_margin,
    sigmoid_link,
)
from flowalign.functional.resizing import focus_weights
from flowalign.losses.matching.links import Link, Sigmoid, pair_stats
from flowalign.types import Batch
from flowalign.types.losses import ALONE, Loss, LossContext, MatchingLoss
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval


@dataclass(frozen=True, kw_only=True)
class DenseDPO(MatchingLoss):
    """Mean of -weight log sigmoid(segment_margin) over pairs; undecided pairs contribute 0.

    The logged `implicit_accuracy` and `margin` refer to segments.

    Source: DenseDPO, arXiv:2506.03517.
    """

    reads = frozenset({"reference", "segments"})
    beta: PositiveFloat = 2000.0
    """DPO's beta. If one video is better in all segments, the loss equals DPO's."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        reference = batch["reference"]
        gap = relative_gap(frame_error(batch["policy"]), frame_error(reference))
        segments = batch["segments"].chunk(2)[0]
        if segments.shape != gap.shape:
            raise ValueError(
                f"segments label {segments.shape[1]} frames, the latents have {gap.shape[1]}"
            )
        z, decided = segment_margin(gap, segments, self.beta), segments.any(1)
        count = decided.sum().clamp(min=1)
        stats = pair_stats(sample_error(batch["policy"]), sample_error(reference), self.beta) | {
            "implicit_accuracy": (z.detach() > 0).sum() / count,
            "margin": z.detach().sum() / count,
            "undecided": 1 - decided.float().mean(),
        }
        return self.mean(batch, decided * sigmoid_link(z), stats)


@dataclass(frozen=True, kw_only=True)
class LocalDPO(MatchingLoss):
    """Mean of weight * (DPO + DPO in the mask + sft (l_w + l_w in the mask)) over pairs.

    The error inside the mask does not depend on the mask's size, see `masked_error`.

    Source: Local-DPO, arXiv:2601.04068, and its code. Here each row is normalised by its own mask.
    The released code divides by the mask of the whole batch.
    """

    reads = frozenset({"reference", "region", "region_strength"})
    beta: PositiveFloat = 5000.0
    sft: NonNegativeFloat = 0.1
    """Weight of the winner's error. 0: none."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        policy, reference = batch["policy"], batch["reference"]
        everywhere = sample_error(policy), sample_error(reference)
        region, strength = batch["region"], batch["region_strength"]
        inside = (
            strength * masked_error(policy, region),
            strength * masked_error(reference, region),
        )
        masked, stats = pair_stats(*inside, self.beta), pair_stats(*everywhere, self.beta)
        stats["masked_accuracy"] = masked["implicit_accuracy"]
        stats["masked_margin"] = masked["margin"]
        return self.mean(batch, self._part(*everywhere) + self._part(*inside), stats)

    def _part(
        self, policy: Float[Tensor, "n"], reference: Float[Tensor, "n"]
    ) -> Float[Tensor, "m"]:
        z = implicit_margin(relative_gap(policy, reference), self.beta)
        return sigmoid_link(z) + self.sft * policy.chunk(2)[0]


@dataclass(frozen=True, kw_only=True)
class FocusDPO(MatchingLoss):
    """Mean of weight * link(margin) over pairs, with spatially weighted errors.

    The mask of a row gives the probability that each latent position shows the subject of the
    request, for example from `reward_models.SubjectFocus`. `focus_weights` turns it into weights
    that depend on the noise level.

    Source: FocusDPO, arXiv:2509.01181, a reconstruction because its weights are not published.
    """

    reads = frozenset({"reference", "region"})
    beta: PositiveFloat = 5000.0
    floor: UnitInterval = 0.2
    """Weight of latent positions outside the subject, relative to the largest weight. 1: plain
    DPO."""
    window: PositiveInt = 5
    """Side of the square over which the weights are averaged at pure noise, an odd number of latent
    positions."""
    link: Link = field(default_factory=Sigmoid)
    """Loss of the margin. Default: DPO's sigmoid."""

    def __post_init__(self) -> None:
        """Reject an even window."""
        super().__post_init__()
        if self.window % 2 == 0:
            raise ValueError(f"window is {self.window}; it must be odd, to have a centre")

    @property
    @override
    def at_start(self) -> float:
        return self.link.at_start

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        weights = focus_weights(batch["region"], batch["sigma"], self.floor, self.window)
        policy = masked_error(batch["policy"], weights)
        reference = masked_error(batch["reference"], weights)
        margin = implicit_margin(relative_gap(policy, reference), self.beta)
        stats = pair_stats(policy, reference, self.beta)
        stats["focus"] = weights.flatten(1).amax(1).mean()
        return self.mean(batch, self.link.loss(margin), stats)

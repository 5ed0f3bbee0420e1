"""Train on pairs of videos with one preference per segment (DenseDPO).

Source: DenseDPO, arXiv:2506.03517.
"""

from collections.abc import Set
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import frame_error, sample_error
from flowalign.functional.preference_loss import relative_gap, segment_margin, sigmoid_link
from flowalign.losses.matching.links import pair_stats
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class DenseDPO(MatchingLoss):
    """Mean of -weight log sigmoid(segment_margin) over pairs; undecided pairs contribute 0.

    The logged `implicit_accuracy` and `margin` refer to segments.
    """

    beta: PositiveFloat = 2000.0
    """DPO's beta. If one video is better in all segments, the loss equals DPO's."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return the reference and the segments; undecided pairs lower the loss at the start."""
        return {"reference", "segments"}

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        reference = batch["reference"]
        gap = relative_gap(frame_error(batch["policy"]), frame_error(reference))
        segments = _segments(batch, gap.shape[1])
        z, decided = segment_margin(gap, segments, self.beta), segments.any(1)
        loss = (batch["weight"].chunk(2)[0] * decided * sigmoid_link(z)).mean()
        count = decided.sum().clamp(min=1)
        stats = pair_stats(sample_error(batch["policy"]), sample_error(reference), self.beta)
        return loss, stats | {
            "policy_loss": loss.detach(),
            "implicit_accuracy": (z.detach() > 0).sum() / count,
            "margin": z.detach().sum() / count,
            "undecided": 1 - decided.float().mean(),
        }


def _segments(batch: Batch, num_frames: int) -> Float[Tensor, "m F"]:
    """Return the segment labels of a minibatch, one per latent frame."""
    segments = batch["segments"].chunk(2)[0]
    if segments.shape[1] != num_frames:
        raise ValueError(
            f"segments label {segments.shape[1]} frames, the latents have {num_frames}"
        )
    return segments

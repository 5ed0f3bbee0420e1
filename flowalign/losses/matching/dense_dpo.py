"""Train on pairs of videos with one preference per segment (DenseDPO).

Source: DenseDPO, arXiv:2506.03517.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import frame_error, sample_error
from flowalign.functional.preference_loss import relative_gap, segment_margin, sigmoid_link
from flowalign.losses.matching.links import pair_stats
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
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
    def requirements(self) -> Requirements:
        """Require segments; the loss starts at log 2 times the share of decided pairs."""
        return Requirements(requires={"segments"})

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        reference = residuals.required_reference
        gap = relative_gap(frame_error(residuals.policy), frame_error(reference))
        segments = _segments(batch, gap.shape[1])
        z, decided = segment_margin(gap, segments, self.beta), segments.any(1)
        loss = (batch.weight.chunk(2)[0] * decided * sigmoid_link(z)).mean()
        count = decided.sum().clamp(min=1)
        stats = pair_stats(sample_error(residuals.policy), sample_error(reference), self.beta)
        return loss, stats | {
            "policy_loss": loss.detach(),
            "implicit_accuracy": (z.detach() > 0).sum() / count,
            "margin": z.detach().sum() / count,
            "undecided": 1 - decided.float().mean(),
        }


def _segments(batch: Examples, num_frames: int) -> Float[Tensor, "m F"]:
    """Return the segment labels of a minibatch, one per latent frame."""
    if batch.segments is None:
        raise ValueError("DenseDPO needs pairs with segments; these have none")
    if batch.segments.shape[1] != num_frames:
        raise ValueError(
            f"segments label {batch.segments.shape[1]} frames, the latents have {num_frames}"
        )
    return batch.segments

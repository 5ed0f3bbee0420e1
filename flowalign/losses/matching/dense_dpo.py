"""DenseDPO: of two videos, each may be the better one in some segments.

Source: DenseDPO, arXiv:2506.03517.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.matching import frame_error, sample_error
from flowalign.functional.preference_loss import relative_gap, segment_margin, sigmoid_link
from flowalign.losses.matching.links import pair_stats, require_positive
from flowalign.types import Errors, Examples, MatchingLoss, Traits


@dataclass(frozen=True, kw_only=True)
class DenseDPO(MatchingLoss):
    """Mean over pairs of -weight log sigmoid(segment_margin); pairs without a preference give 0.

    `implicit_accuracy` and `margin` of the log are those of the segments.
    """

    beta: float = 2000.0
    """DPO's: the same beta and the same value where one video is better throughout."""

    def __post_init__(self) -> None:
        """Refuse what prefers nothing."""
        require_positive(beta=self.beta)

    @property
    @override
    def traits(self) -> Traits:
        """At the start the logarithm of 2, times the share of pairs that have a preference."""
        return Traits(needs={"segments"})

    @override
    def loss(self, errors: Errors, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the pairs, and detached scalars for the log."""
        reference = errors.required_reference
        gap = relative_gap(frame_error(errors.policy), frame_error(reference))
        segments = _segments(batch, gap.shape[1])
        z, decided = segment_margin(gap, segments, self.beta), segments.any(1)
        loss = (batch.weight.chunk(2)[0] * decided * sigmoid_link(z)).mean()
        count = decided.sum().clamp(min=1)
        stats = pair_stats(sample_error(errors.policy), sample_error(reference), self.beta)
        return loss, stats | {
            "policy_loss": loss.detach(),
            "implicit_accuracy": (z.detach() > 0).sum() / count,
            "margin": z.detach().sum() / count,
            "undecided": 1 - decided.float().mean(),
        }


def _segments(batch: Examples, num_frames: int) -> Float[Tensor, "m F"]:
    """The labels of a minibatch, one per latent frame."""
    if batch.segments is None:
        raise ValueError("DenseDPO needs pairs with segments; these have none")
    if batch.segments.shape[1] != num_frames:
        raise ValueError(
            f"segments label {batch.segments.shape[1]} frames, the latents have {num_frames}"
        )
    return batch.segments

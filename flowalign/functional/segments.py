"""Split clips in time, in frames or latent frames, and label which of two is better where.

Axes: m pairs, C segments of a clip.
"""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

Span = tuple[int, int]
"""Index of the first frame, and of the one after the last."""


def split_spans(num_frames: int, length: float) -> list[Span]:
    """Cut frames into at least one part of about this length, as even as possible."""
    count = min(max(1, round(num_frames / length)), num_frames)
    ends = [round(i * num_frames / count) for i in range(count + 1)]
    return list(pairwise(ends))


def temporal_stride(num_frames: int, num_latent: int) -> int:
    """Return the number of frames per latent frame, as causal video VAEs count.

    The first latent frame stands for the first frame alone.

    Raises:
        ValueError: these numbers belong to no such VAE.
    """
    if num_latent == 1 and num_frames == 1:
        return 1
    if num_latent < 2 or num_frames < num_latent or (num_frames - 1) % (num_latent - 1):
        raise ValueError(
            f"{num_frames} frames from {num_latent} latent frames: expected 1 + k * "
            f"{num_latent - 1} with a whole number k"
        )
    return (num_frames - 1) // (num_latent - 1)


def find_frames(latent: Span, stride: int) -> Span:
    """Return the frames that a span of latent frames stands for."""
    start, stop = latent
    return max(0, 1 + (start - 1) * stride), 1 + (stop - 1) * stride


def compare_with_margin(
    a: Float[Tensor, "m C"], b: Float[Tensor, "m C"], margin: float
) -> Float[Tensor, "m C"]:
    """Return 1 where a is better by more than the margin, -1 where b is, 0 for a tie."""
    gap = a - b
    return torch.where(gap.abs() > margin, gap.sign(), 0.0)

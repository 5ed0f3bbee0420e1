"""Split clips into segments of frames or latent frames, and label the better clip of a pair.

Axes: m pairs, C segments of a clip.
"""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

Span = tuple[int, int]
"""Range [start, stop) of frames."""


def split_spans(num_frames: int, length: float) -> list[Span]:
    """Split frames into spans of about `length` frames, as evenly as possible; at least one."""
    count = min(max(1, round(num_frames / length)), num_frames)
    ends = [round(i * num_frames / count) for i in range(count + 1)]
    return list(pairwise(ends))


def temporal_stride(num_frames: int, num_latent: int) -> int:
    """Return the number of frames per latent frame of a causal video VAE.

    The first latent frame encodes only the first frame.

    Raises:
        ValueError: The numbers do not fit a causal VAE.
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
    """Return the span of frames that a span of latent frames encodes."""
    start, stop = latent
    return max(0, 1 + (start - 1) * stride), 1 + (stop - 1) * stride


def compare_with_margin(
    a: Float[Tensor, "m C"], b: Float[Tensor, "m C"], margin: float
) -> Float[Tensor, "m C"]:
    """Return 1 if a is better by more than `margin`, -1 if b is, and 0 for a tie."""
    gap = a - b
    return torch.where(gap.abs() > margin, gap.sign(), 0.0)

"""Pool the scores of a video's frames into one score."""

import math
from typing import Literal

from jaxtyping import Float
from torch import Tensor

Pool = Literal["mean", "min", "soft_min"]


def soft_min(scores: Float[Tensor, "n F R"], temperature: float) -> Float[Tensor, "n R"]:
    """Return -temperature * log mean exp(-score / temperature) over frames, in score units.

    It lies between the mean, its limit for a high temperature, and the minimum, its limit for a low
    one; at most temperature * log F above the minimum. Every frame has a gradient, bad ones the
    largest.
    """
    frames = scores.shape[1]
    return temperature * (math.log(frames) - (-scores / temperature).logsumexp(1))


def pooled(
    scores: Float[Tensor, "n F R"], over: Pool, temperature: float | None = None
) -> Float[Tensor, "n R"]:
    """Return one score from those of F frames; only `soft_min` needs a temperature."""
    if over == "soft_min":
        assert temperature is not None, "soft_min has a temperature"
        return soft_min(scores, temperature)
    return scores.mean(1) if over == "mean" else scores.amin(1)

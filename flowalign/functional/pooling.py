"""One score for a video out of the scores of its frames."""

import math
from typing import Literal

from jaxtyping import Float
from torch import Tensor

Pool = Literal["mean", "min", "soft_min"]


def soft_min(scores: Float[Tensor, "n F R"], temperature: float) -> Float[Tensor, "n R"]:
    """-temperature * log mean exp(-score / temperature) over frames, in the units of the scores.

    Between the mean, its limit for a high temperature, and the minimum, that for a low one; at most
    temperature * log F above the minimum. Every frame has a gradient, bad ones the most.
    """
    frames = scores.shape[1]
    return temperature * (math.log(frames) - (-scores / temperature).logsumexp(1))


def pooled(
    scores: Float[Tensor, "n F R"], over: Pool, temperature: float | None = None
) -> Float[Tensor, "n R"]:
    """Scores of F frames as one; only `soft_min` has a temperature."""
    if over == "soft_min":
        assert temperature is not None, "soft_min has a temperature"
        return soft_min(scores, temperature)
    return scores.mean(1) if over == "mean" else scores.amin(1)

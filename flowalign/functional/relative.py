"""Compare the scores of an image under two prompts, so that biases of the reward cancel.

Source: SRPO, arXiv:2509.06942; its code, Tencent-Hunyuan/SRPO.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

RelativeForm = Literal["released", "difference", "guided"]
"""Form of the relative reward. released: (1 + k) wanted - unwanted, from the authors' code.
difference: wanted - unwanted, the paper's semantic relative preference. guided: (1 - k) unwanted +
k wanted, the paper's form that resembles classifier-free guidance."""


def relative_reward(
    wanted: Float[Tensor, "n *R"], unwanted: Float[Tensor, "n *R"], k: float, form: RelativeForm
) -> Float[Tensor, "n *R"]:
    """Return the score under one prompt relative to another; `difference` ignores k."""
    if form == "released":
        return (1 + k) * wanted - unwanted
    if form == "difference":
        return wanted - unwanted
    return torch.lerp(unwanted, wanted, k)


def ramp(ends: tuple[float, float], place: float) -> float:
    """Return the linear interpolation between two numbers at `place` in [0, 1]."""
    return ends[0] + place * (ends[1] - ends[0])

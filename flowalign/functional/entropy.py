"""Compute the entropy of denoising steps, and lengthen steps until their entropy is sufficient.

Source: E-GRPO, arXiv:2601.00423.
"""

import math

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import Kernel


def step_entropy(std: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return 0.5 log(2 pi e std^2), the entropy of one latent element; -inf where std is 0."""
    return std.log() + 0.5 * math.log(2 * math.pi * math.e)


def merge_steps(
    kernel: Kernel,
    sigmas: Float[Tensor, "S"],
    k: int,
    eta: Float[Tensor, ""],
    threshold: float,
) -> Float[Tensor, "S"]:
    """Return the schedule with step k lengthened until exp(step_entropy) reaches the threshold.

    `eta` is the noise level of step k. Schedule points inside the longer step move to its end and
    become steps of length 0, which do nothing. The step never reaches sigma 0. It stops growing if
    more length adds no noise, as with CPS.
    """
    merged, least = sigmas, -math.inf
    for j in range(k + 1, len(sigmas) - 1):
        longer = sigmas.clone()
        longer[k + 1 : j] = sigmas[j]
        entropy = float(step_entropy(kernel.coefficients(longer, k, eta[None]).std))
        if entropy <= least:
            return merged
        merged, least = longer, entropy
        if math.exp(entropy) >= threshold:
            return merged
    return merged

"""Take longer deterministic steps: of second order, or as long as their entropy is sufficient.

Source of the multistep ODE solver DPM-Solver++(2M): arXiv:2211.01095. MixGRPO-Flash,
arXiv:2507.21802v7, uses it after its window. Source of the entropy: E-GRPO, arXiv:2601.00423.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import Kernel


def thin_schedule(sigmas: Float[Tensor, "S"], path: Sequence[int]) -> Float[Tensor, "S"]:
    """Return the schedule with steps between the points of `path`, at the same length.

    Points between two points of the path move to the first of the two, and become steps of length
    0, which do nothing.
    """
    thinned = sigmas.clone()
    for start, stop in pairwise(path):
        thinned[start + 1 : stop] = sigmas[start]
    return thinned


def second_order_step(
    x: Float[Tensor, "n *latent"],
    x0_hat: Float[Tensor, "n *latent"],
    x0_before: Float[Tensor, "n *latent"],
    before: Float[Tensor, ""],
    sigma: Float[Tensor, ""],
    following: Float[Tensor, ""],
) -> Float[Tensor, "n *latent"]:
    """Return the state at `following`, from the data predicted at `sigma` and at `before`.

    With lambda = log((1 - sigma) / sigma), it is the Euler step to the data
    x0_hat + (x0_hat - x0_before) h / (2 h_before), where h and h_before are the increases of lambda
    over this and the previous step. From pure noise and to clean data, lambda is infinite, so it is
    the Euler step to x0_hat.
    """
    target = x0_hat
    if before < 1 and following > 0:
        growth = (_log_odds(following) - _log_odds(sigma)) / (_log_odds(sigma) - _log_odds(before))
        target = x0_hat + growth / 2 * (x0_hat - x0_before)
    return following / sigma * x + (1 - following / sigma) * target


def _log_odds(sigma: Float[Tensor, ""]) -> Float[Tensor, ""]:
    return ((1 - sigma) / sigma).log()


def step_entropy(std: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return 0.5 log(2 pi e std^2), the entropy of one latent element; -inf where std is 0."""
    return std.log() + 0.5 * math.log(2 * math.pi * math.e)


def merge_steps(
    kernel: Kernel, sigmas: Float[Tensor, "S"], k: int, eta: Float[Tensor, ""], threshold: float
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

"""Take longer, second-order deterministic steps with the multistep ODE solver DPM-Solver++(2M).

Source: DPM-Solver++, arXiv:2211.01095. MixGRPO-Flash, arXiv:2507.21802v7, uses it after its window.
"""

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor


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

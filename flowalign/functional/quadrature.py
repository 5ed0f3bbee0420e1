"""Integrate a velocity over sigma from its values at a few points by interpolatory quadrature.

Source: FlowBP-Lagrange, arXiv:2606.11075.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def support_points(start: int, stop: int, order: int) -> list[int]:
    """Return at most `order` evenly spaced steps of start ... stop - 1, including both ends.

    With order 1 the only point is `start`.
    """
    count = stop - start
    if count <= order:
        return list(range(start, stop))
    places = torch.linspace(0, count - 1, order).round().long().tolist()
    return [start + place for place in places]


def lagrange_weights(
    points: Float[Tensor, "m"], start: Float[Tensor, ""], stop: Float[Tensor, ""]
) -> Float[Tensor, "m"]:
    """Return the integrals from start to stop of the Lagrange basis polynomials of the points.

    The weighted sum of values at the points integrates every polynomial of degree below m exactly.
    The weights are computed in float64 and returned in the dtype of `points`.
    """
    # A Vandermonde matrix is ill-conditioned: float32 would lose several digits.
    x, m = points.double(), len(points)
    powers = torch.arange(m, dtype=torch.float64, device=x.device)
    moments = (stop.double() ** (powers + 1) - start.double() ** (powers + 1)) / (powers + 1)
    return torch.linalg.solve(x[None] ** powers[:, None], moments).to(points)

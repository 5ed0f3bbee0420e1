"""Move clean predictions along a reward gradient, within a ball (DiffusionOPSD)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import per_row

_TINY = 1e-12
"""Added to the norm that divides a gradient, from the code of DiffusionOPSD."""

Gradient = Callable[[Tensor], Tensor]
"""Function that returns the gradient of each row's reward in its clean latent."""


def ascend_and_descend(
    clean: Float[Tensor, "n *latent"], gradient: Gradient, steps: int, radius: float, share: float
) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n *latent"]]:
    """Return the displacements of `clean` up and down the reward, after `steps` steps each.

    A step has length share * r / steps along the normalised gradient, where r = radius * ||clean||.
    After each step, the displacement is projected onto the ball of radius r. Both directions share
    the first gradient, so `gradient` is called 2 * steps - 1 times.

    Source: DiffusionOPSD, arXiv:2608.24646, and its code.
    """
    ball = radius * _norm(clean)
    first = gradient(clean)
    up, down = (
        _move(clean, sign, first, gradient, steps, ball, share * ball / steps) for sign in (1, -1)
    )
    return up, down


def _move(
    clean: Float[Tensor, "n *latent"],
    sign: int,
    direction: Float[Tensor, "n *latent"],
    gradient: Gradient,
    steps: int,
    ball: Float[Tensor, "n"],
    length: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return the displacement of one sign, whose first step is along `direction`."""
    moved = torch.zeros_like(clean)
    for m in range(steps):
        g = direction if m == 0 else gradient(clean + moved)
        moved = moved + sign * per_row(length / (_norm(g) + _TINY), g) * g
        moved = moved * per_row((ball / _norm(moved).clamp(min=_TINY)).clamp(max=1), moved)
    return moved


def _norm(x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n"]:
    """Return the Euclidean norm of each row."""
    return x.flatten(1).norm(dim=1)

"""Compare the gradients of the terms of a loss at the output of the network."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

POLICY = "policy"
"""Name of the policy term, which auxiliary terms are compared with."""
PREFIX = "gradient_square/"
"""Prefix of the squared norms in the statistics of a loss."""


def gradient_squares(
    mean: Float[Tensor, "n *latent"], terms: Mapping[str, Float[Tensor, ""]]
) -> dict[str, Float[Tensor, ""]]:
    """Return the mean over samples of each term's squared gradient at the network's output.

    `terms` are means over the samples of `mean`. Squares are averaged, because their mean over all
    micro-batches and processes does not depend on the division of samples. The result is empty if
    there are no auxiliary terms or no gradient is recorded. The gradients stop at the output of the
    network, so they need no backward pass through it.
    """
    if len(terms) < 2 or not mean.requires_grad:
        return {}
    squares = {}
    for name, term in terms.items():
        gradient = None
        if term.requires_grad:  # a detached term is found by the checks of a run
            (gradient,) = torch.autograd.grad(term, mean, retain_graph=True, allow_unused=True)
        if gradient is None:
            squares[PREFIX + name] = mean.new_zeros(())
        else:
            squares[PREFIX + name] = len(mean) * gradient.square().sum()
    return squares

"""Compare the gradients of the terms of a loss at the output of the network."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

POLICY = "policy"
"""Name of the policy term, which auxiliary terms are compared with."""
PREFIX = "gradient_norm/"
"""Prefix of the norms in the statistics of a loss."""


def gradient_norms(
    mean: Float[Tensor, "n *latent"], terms: Mapping[str, Float[Tensor, ""]]
) -> dict[str, Float[Tensor, ""]]:
    """Return the norm of each term's gradient with respect to the means of the transitions.

    The result is empty if there are no auxiliary terms or no gradient is recorded. The gradients
    stop at the output of the network, so they need no backward pass through it.
    """
    if len(terms) < 2 or not mean.requires_grad:
        return {}
    norms = {}
    for name, term in terms.items():
        gradient = None
        if term.requires_grad:  # a detached term is found by the checks of a run
            (gradient,) = torch.autograd.grad(term, mean, retain_graph=True, allow_unused=True)
        norms[PREFIX + name] = mean.new_zeros(()) if gradient is None else gradient.norm()
    return norms

"""Compute the log-density of a span: consecutive denoising steps whose gradient flows through all.

Source: CogniEdit, arXiv:2512.13276v1.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.path_gradient import straight_through
from flowalign.functional.transition import Kernel, log_density, transition


def span_log_density(
    kernel: Kernel,
    states: Sequence[Float[Tensor, "n *latent"]],
    velocities: Sequence[Float[Tensor, "n *latent"]],
    sigmas: Float[Tensor, "S"],
    first: int,
    etas: Sequence[Float[Tensor, "n"]],
) -> Float[Tensor, "n"]:
    """Return sum_k log pi(x_{k+1} | x_k) over the steps k = first, first + 1, ... of a span.

    `states` are those that the old policy reached, one more than there are velocities. Each state
    keeps its value, to the bit, but carries the gradient of the mean of the step before: a velocity
    answers for the density of its own step and, along the latents, of all later ones. The gradient
    at the states that the velocities were evaluated at is the caller's; CogniEdit stops it there,
    so that no Jacobian of the network is needed.
    """
    x, found = states[0], []
    for i, velocity in enumerate(velocities):
        step = transition(kernel, x, velocity, sigmas, first + i, etas[i])
        found.append(log_density(kernel, states[i + 1], step))
        x = straight_through(states[i + 1], step.mean)
    return torch.stack(found).sum(0)


def find_spans(trained: Sequence[int], longest: int) -> list[list[int]]:
    """Return runs of consecutive steps, each of at most `longest`, that the increasing steps form.

    A run that does not divide evenly has its short span last.
    """
    spans: list[list[int]] = []
    for k in trained:
        if spans and spans[-1][-1] == k - 1 and len(spans[-1]) < longest:
            spans[-1].append(k)
        else:
            spans.append([k])
    return spans

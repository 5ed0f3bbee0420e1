"""Compute the log-density of a span, consecutive denoising steps with a gradient through all.

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

    `states` are the states that the old policy reached, one more than there are velocities. Each
    state keeps its exact value but carries the gradient of the mean of the previous step. A
    velocity therefore gets a gradient from the density of its step and, through the latents, of all
    later steps. The caller decides whether gradients flow into the states at which velocities were
    evaluated. CogniEdit detaches them, so no Jacobian of the network is needed.
    """
    x, found = states[0], []
    for i, velocity in enumerate(velocities):
        step = transition(kernel, x, velocity, sigmas, first + i, etas[i])
        found.append(log_density(kernel, states[i + 1], step))
        x = straight_through(states[i + 1], step.mean)
    return torch.stack(found).sum(0)


def find_spans(trained: Sequence[int], longest: int) -> list[list[int]]:
    """Return the spans of at most `longest` consecutive steps in an increasing list of steps.

    If a run does not divide evenly, its last span is shorter.
    """
    spans: list[list[int]] = []
    for k in trained:
        if spans and spans[-1][-1] == k - 1 and len(spans[-1]) < longest:
            spans[-1].append(k)
        else:
            spans.append([k])
    return spans

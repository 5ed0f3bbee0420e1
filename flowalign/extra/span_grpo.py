"""Compute GRPO on spans of denoising steps: one ratio, one clip and one gradient per span.

Source: dense reward optimisation in CogniEdit, arXiv:2512.13276v1, reconstructed from notes on the
paper: ratio = exp(sum over the span of log pi - log pi_old), clipped as a whole, with detached
network inputs. The released code (yl4467/CogniEdit) instead clips each step separately and gives
the network a gradient only at the first step of the span.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.path_gradient import straight_through
from flowalign.functional.surrogate import ppo_clip
from flowalign.functional.transition import Kernel, log_density, transition
from flowalign.losses.policy_gradient.grpo import ratio_stats
from flowalign.types import Batch, Fields, PolicyLoss, step_of, steps_of
from flowalign.types.losses import Loss
from flowalign.utils.ranges import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class SpanGRPO(PolicyLoss):
    """Mean of weight * -min(r A, clip(r) A) over spans, with r the product of a span's ratios.

    A is the mean advantage of the steps. With spans of one step it equals `GRPO` without a KL.
    """

    span_steps: PositiveInt = 5
    """Largest number of consecutive trained steps in a span. Their activations are kept in memory
    together. Default: 5, as in CogniEdit."""
    clip_range: PositiveFloat = 1e-4
    """Clip range of the product. Default: 1e-4, which CogniEdit's code applies to single steps."""

    @property
    @override
    def span(self) -> int:
        return self.span_steps

    @property
    @override
    def clip(self) -> float:
        return self.clip_range

    @override
    def loss(self, fields: Fields, batch: Batch) -> Loss:
        steps = steps_of(batch)
        first = steps[0]
        logp = span_log_density(
            fields.kernel,
            [first["x"].float(), *(step["x_next"].float() for step in steps)],
            [fields.velocity(fields.policy, step) for step in steps],
            fields.sigmas,
            step_of(first),
            [step["eta"] for step in steps],
        )
        log_ratio = logp - torch.stack([step["logp_old"] for step in steps]).sum(0)
        loss = (first["weight"] * ppo_clip(log_ratio, first["advantage"], self.clip)).mean()
        stats = ratio_stats(log_ratio.detach(), first["advantage"], self.clip)
        return loss, stats | {"policy_loss": loss.detach()}


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

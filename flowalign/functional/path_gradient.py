"""Propagate the gradient of a reward from a sample to the velocities of its rollout.

Source: the framework of FlowBP, arXiv:2606.11075; functions name further sources.

FlowBP-Lagrange of the same paper integrates a velocity over sigma from its values at a few points.

Adjoint matching matches a policy's control of a stochastic sampler to the lean adjoint of the
initial model. A step of the sampler is x' = keep x + slope v + std noise. Relative to the initial
model, the policy controls it by u = slope (v - v_base) / std. The control that maximises
lam r(x_T) - sum u^2 / 2 in expectation is u = -std E[a' | x], for the adjoint a' at the end of the
step under the optimal policy. For the memoryless flow SDE, u is -sqrt(h) (2 / g) (v - v_base).
Source: Adjoint Matching, arXiv:2409.08861, in the discrete form of its code,
microsoft/soc-fine-tuning-sd.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import per_row


def straight_through(
    value: Float[Tensor, "n *latent"], path: Float[Tensor, "n *latent"]
) -> Float[Tensor, "n *latent"]:
    """Return exactly `value`, with the gradient of `path`."""
    # Keep this order: the difference is exactly 0, while (value + path) - path would round.
    return value.detach() + (path - path.detach())


def scale_gradient(x: Float[Tensor, "n *latent"], factor: float) -> Float[Tensor, "n *latent"]:
    """Return x with its gradient multiplied by `factor`; 0 detaches it."""
    return straight_through(x, factor * x)


def predict_clean(
    x: Float[Tensor, "n *latent"], v: Float[Tensor, "n *latent"], sigma: Float[Tensor, ""]
) -> Float[Tensor, "n *latent"]:
    """Return the clean latents x - sigma v, the Euler step from sigma to 0."""
    return x - sigma * v


def euler_sum(
    velocities: Mapping[int, Float[Tensor, "n *latent"]], sigmas: Float[Tensor, "S"]
) -> Float[Tensor, "n *latent"]:
    """Return the sum of (sigma_{k+1} - sigma_k) v_k over the steps k in `velocities`.

    The sum is the contribution of the steps to the end of an Euler rollout, and carries their
    gradient.
    """
    return torch.stack([(sigmas[k + 1] - sigmas[k]) * v for k, v in velocities.items()]).sum(0)


def rescale_factor(
    active: Float[Tensor, "a"], whole: Float[Tensor, "b"], strength: float
) -> Float[Tensor, ""]:
    """Return 1 + strength (sum |whole| / sum |active| - 1), which compensates for inactive steps.

    At strength 1 the rescaled weights of the active steps have the same sum as all steps.

    Source: FlowBP-Sparse, arXiv:2606.11075.
    """
    return 1 + strength * (whole.abs().sum() / active.abs().sum() - 1)


def closeness_weight(
    predicted: Float[Tensor, "n *latent"],
    reached: Float[Tensor, "n *latent"],
    predicted_x0: Float[Tensor, "n *latent"],
    x0: Float[Tensor, "n *latent"],
    floor: float,
) -> Float[Tensor, "n"]:
    """Return 1 / (max(d_j, floor) + max(d_0, floor)), a lower weight for inaccurate leaps.

    d_j and d_0 are the mean absolute differences between the ends of a leap and the rollout. The
    weight has no gradient.

    Source: LeapAlign, arXiv:2604.15311.
    """
    with torch.no_grad():
        missed = [
            (a - b).abs().flatten(1).mean(1).clamp(min=floor)
            for a, b in ((predicted, reached), (predicted_x0, x0))
        ]
    return 1 / (missed[0] + missed[1])


def recover_clean(
    x: Float[Tensor, "n *latent"], noise: Float[Tensor, "n *latent"], sigma: Float[Tensor, ""]
) -> Float[Tensor, "n *latent"]:
    """Return (x - sigma noise) / (1 - sigma), the clean latents of a state with known noise.

    The result diverges at sigma = 1.

    Source: Direct-Align, arXiv:2509.06942.
    """
    return (x - sigma * noise) / (1 - sigma)


def reward_gradient_loss(
    clean: Float[Tensor, "n *latent"],
    gradient: Float[Tensor, "n *latent"],
    weight: Float[Tensor, "n"],
) -> Float[Tensor, ""]:
    """Return a scalar with gradient weight * `gradient` per sample with respect to `clean`."""
    return (clean * per_row(weight, clean) * gradient).sum()


def pull_through_step(
    adjoint: Float[Tensor, "n *latent"],
    pulled: Float[Tensor, "n *latent"],
    keep: Float[Tensor, "n"],
    slope: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return keep a + slope J^T a, the adjoint a at the end of a step at its start.

    `pulled` is J^T a for the Jacobian J of the initial model's velocity. The adjoint is lean: it
    leaves out the Jacobian of the control, which is not 0 away from the optimum.
    """
    return per_row(keep, adjoint) * adjoint + per_row(slope, adjoint) * pulled


def control_error(
    change: Float[Tensor, "n *latent"],
    adjoint: Float[Tensor, "n *latent"],
    slope: Float[Tensor, "n"],
    std: Float[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Return mean (u + std a)^2 with u = slope * change / std, for change = v - v_base.

    `adjoint` is the adjoint a at the end of the step.
    """
    control = per_row(slope / std, change) * change
    return sample_error(control + per_row(std, adjoint) * adjoint)

"""Match a policy's control of a stochastic sampler to the lean adjoint of the initial model.

A step of the sampler is x' = keep x + slope v + std noise. Relative to the initial model, the
policy controls it by u = slope (v - v_base) / std. The control that maximises
lam r(x_T) - sum u^2 / 2 in expectation is u = -std E[a' | x], for the adjoint a' at the end of the
step under the optimal policy.

Source: Adjoint Matching, arXiv:2409.08861, in the discrete form of its code,
microsoft/soc-fine-tuning-sd. For the memoryless flow SDE, u is -sqrt(h) (2 / g) (v - v_base).
"""

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import per_row


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

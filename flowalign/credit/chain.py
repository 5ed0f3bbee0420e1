"""Find the stochastic steps of a chain, and spread their credit over all steps."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.credit.group_ids import prompt_step_ids
from flowalign.types import StepCredit, Trajectory


def stochastic_steps(trajectory: Trajectory) -> list[int]:
    """Return the indices of a trajectory's trained steps, increasing.

    ODE steps need no separate value. They are deterministic, so state k + 1 has the value of the
    next stochastic state or, if there is none, the outcome. Values at [*steps, T] therefore cover a
    chain. A change of value at an untrained stochastic step is credited to the last trained step
    before it.
    """
    stochastic = trajectory.eta > 0
    stochastic[:, list(trajectory.untrained)] = False
    if (stochastic != stochastic[:1]).any():
        raise ValueError(
            "credit along a chain needs the same stochastic steps in every sample, but "
            "these trajectories branch: set recipe.sampling.branching to flowalign.sampling.Chain"
        )
    return stochastic[0].nonzero().flatten().tolist()


def step_credit(
    trajectory: Trajectory,
    steps: Sequence[int],
    credit: Float[Tensor, "B n R"],
    marked: Bool[Tensor, "B n"] | None = None,
) -> StepCredit:
    """Return credit over all steps, 0 outside `steps`; `marked` flags some of the given steps."""
    value = credit.new_zeros(len(credit), trajectory.num_steps, credit.shape[-1])
    value[:, list(steps)] = credit
    everywhere = None
    if marked is not None:
        everywhere = torch.zeros(value.shape[:2], dtype=torch.bool)
        everywhere[:, list(steps)] = marked
    return StepCredit(value, prompt_step_ids(trajectory), trajectory.trained, marked=everywhere)

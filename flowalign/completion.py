"""Finishing intermediate states by ODE, all together: what makes step-level credit affordable."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import Kernel
from flowalign.rollout import velocity
from flowalign.types import CreditEstimator, Trajectory, VelocityField


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Over which points of the sampler's own schedule an intermediate state is finished."""

    max_steps: int | None = None
    """None: every remaining step (DenseGRPO, TP-GRPO). 1: the one-step prediction of the data.
    m: about evenly spaced remaining points (Stepwise-Flow-GRPO uses 5)."""
    stride: int = 1
    """Take every stride-th remaining point; the granularity of G2RPO."""

    def __post_init__(self) -> None:
        """Refuse completions of no step."""
        if self.stride < 1 or (self.max_steps is not None and self.max_steps < 1):
            raise ValueError(
                f"completion with max_steps {self.max_steps}, stride {self.stride}: "
                "both need at least 1"
            )

    def path(self, k: int, num_steps: int) -> list[int]:
        """Indices of the schedule that a tail from state k visits: k first, num_steps last."""
        points = [*range(k, num_steps, self.stride), num_steps]
        hops = len(points) - 1
        if self.max_steps is None or hops <= self.max_steps:
            return points
        return [points[round(i * hops / self.max_steps)] for i in range(self.max_steps + 1)]


@torch.no_grad()
def complete(
    field: VelocityField,
    trajectory: Trajectory,
    ks: Collection[int],
    how: Completion,
    micro_batch: int,
) -> dict[int, Float[Tensor, "B *latent"]]:
    """Clean latents that the ODE reaches from each of the states ks.

    A wavefront: all tails that stand at sigma_i take their step from there as one batch, so there
    are at most T - min(ks) sequential calls, however many states. The first step of a tail reuses
    the rollout's own velocity where the trajectory kept it.
    """
    sigmas, num_steps = trajectory.sigmas, trajectory.num_steps
    row = (
        torch.arange(len(trajectory.logp), device=trajectory.states.device) // trajectory.group_size
    )
    ahead = {k: how.path(k, num_steps) for k in ks}
    at = {k: trajectory.states[:, k].float() for k in ks}
    for i in range(min(ks, default=num_steps), num_steps):
        here = [k for k, path in ahead.items() if path[0] == i]
        known = trajectory.velocities.get(i) if i in here else None
        asked = [k for k in here if k != i or known is None]
        v = {i: known} if known is not None else {}
        if asked:
            x = torch.cat([at[k] for k in asked])
            new = velocity(
                field, x, sigmas[i], trajectory.cond, row.repeat(len(asked)), micro_batch
            )
            v |= dict(zip(asked, new.split(len(row)), strict=True))
        for k in here:
            ahead[k].pop(0)
            at[k] = at[k] + (sigmas[ahead[k][0]] - sigmas[i]) * v[k]
    return at


def num_evaluations(ks: Collection[int], num_steps: int, how: Completion) -> int:
    """Network evaluations per sample for completing states ks, first velocities being known."""
    return sum(len(how.path(k, num_steps)) - 2 for k in ks if k < num_steps)


def asked_states(
    credit: CreditEstimator, kernel: Kernel, num_steps: int, steps: Sequence[int]
) -> tuple[int, ...]:
    """The states whose values a credit method asks for, found out on a trajectory of zeros."""
    eta = torch.zeros(num_steps)
    eta[list(steps)] = 1.0
    nothing = Trajectory(
        logp=torch.zeros(2, num_steps), states=torch.zeros(2, num_steps + 1, 1),
        sigmas=torch.linspace(1, 0, num_steps + 1), eta=eta.expand(2, -1), kernel=kernel, cond={},
        prompts=["", ""], group_size=2,
    )  # fmt: skip
    asked: set[int] = set()

    def values(ks: Sequence[int]) -> Float[Tensor, "B K R"]:
        asked.update(ks)
        return torch.zeros(2, len(ks), 1)

    credit(nothing, values)
    return tuple(sorted(asked))

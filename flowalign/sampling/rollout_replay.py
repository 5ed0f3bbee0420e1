"""Evaluate steps of cached rollouts again, with a gradient to the policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.path_gradient import straight_through
from flowalign.types import Cond, Policy, Replay, Trajectory, VelocityField
from flowalign.types.trajectory import take_rows
from flowalign.utils.seeds import generator


@dataclass
class NetworkEvaluation:
    """Network evaluation with gradient, for regularisers."""

    x: Float[Tensor, "n *latent"]
    """State, without gradient."""
    sigma: Float[Tensor, ""]
    """Noise level of the state."""
    v: Float[Tensor, "n *latent"]
    """Velocity with gradient."""


PullBack = Callable[[Tensor, Tensor, Cond, Tensor], tuple[Tensor, Tensor]]
"""Function from x, sigma, conditioning and a vector to v and (dv / dx)^T vector."""


@dataclass
class CachedReplay(Replay):
    """Replay of some samples of a rollout, or of given clean latents.

    `conditional` is the policy without classifier-free guidance. If it is set, the unconditional
    branch of a guided velocity is detached. At states of the rollout, one conditional evaluation is
    then enough.
    """

    policy: Policy
    """Policy with the parameters that get the gradient."""
    trajectory: Trajectory
    """Rollout. Given clean latents are its last state, without a state 0."""
    samples: Int[Tensor, "n"]
    """Indices of the samples in the micro-batch."""
    keys: Sequence[tuple[int, ...]]
    """Seed, step and index of each sample, which seed its noise."""
    conditional: VelocityField | None = None
    """Policy without guidance. None: the whole guided velocity has a gradient."""
    base: PullBack | None = None
    """Pull-back of the initial model. None: gradient paths do not use it."""
    evaluated: list[NetworkEvaluation] = field(default_factory=list)
    """Evaluations since the list was last cleared."""

    def __post_init__(self) -> None:
        """Select the schedule and the conditioning of the samples."""
        self.sigmas, self.kernel = self.trajectory.sigmas, self.trajectory.kernel
        row = self.samples // self.trajectory.group_size
        self.cond: Cond = take_rows(self.trajectory.cond, row.to(self.trajectory.device))

    @override
    def state(self, k: int) -> Tensor:
        if k not in self.trajectory.states:
            raise ValueError(
                f"state {k} was not kept; the samples have the states "
                f"{sorted(self.trajectory.states)}"
            )
        return self.trajectory.state(k, self.samples)

    @override
    def velocity(self, k: int, x: Tensor | None = None) -> Tensor:
        x = self.state(k) if x is None else x
        if self.conditional is None:
            return self._record(x, self.sigmas[k], self._evaluate(self.policy, x, self.sigmas[k]))
        return self._guide(x, self.sigmas[k], self.cached_velocity(k))

    @override
    def velocity_at(self, x: Tensor, sigma: Tensor) -> Tensor:
        if self.conditional is None:
            return self._record(x, sigma, self._evaluate(self.policy, x, sigma))
        with torch.no_grad():
            value = self._evaluate(self.policy, x, sigma)
        return self._guide(x, sigma, value)

    @override
    def eta(self, k: int) -> Tensor:
        return self.trajectory.eta[self.samples.to(self.trajectory.eta.device), k]

    @override
    def pull_back(self, k: int, vector: Tensor) -> tuple[Tensor, Tensor]:
        assert self.base is not None, "only a gradient path that matches uses the initial model"
        return self.base(self.state(k), self.sigmas[k], self.cond, vector)

    @override
    def initial_noise(self) -> Tensor:
        if 0 in self.trajectory.states and self.sigmas[0] == 1:
            return self.state(0)
        return self.noise(-1)

    @override
    def noise(self, i: int) -> Tensor:
        shape = self.state(self.num_steps).shape[1:]
        # Seeded per sample, so the noise does not depend on micro-batches and processes.
        noises = [
            torch.randn(shape, generator=generator(seed, "replay", *index, i), dtype=torch.float32)
            for seed, *index in self.keys
        ]
        return torch.stack(noises).to(self.trajectory.device)

    @override
    def schedule(self, num_steps: int) -> Tensor:
        return self.policy.schedule(num_steps)

    def _evaluate(self, velocities: VelocityField, x: Tensor, sigma: Tensor) -> Tensor:
        return velocities.velocity(x, sigma, self.cond)

    def _guide(self, x: Tensor, sigma: Tensor, value: Tensor) -> Tensor:
        """Return `value` with the gradient of its conditional branch."""
        assert self.conditional is not None
        part = self._evaluate(self.conditional, x, sigma)
        return self._record(x, sigma, straight_through(value, self.policy.guidance * part))

    def _record(self, x: Tensor, sigma: Tensor, v: Tensor) -> Tensor:
        self.evaluated.append(NetworkEvaluation(x.detach(), sigma, v))
        return v

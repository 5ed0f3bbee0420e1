"""Renoise the boundaries of the generator's trajectories."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.distribution_matching import levels_above, renoise_boundary
from flowalign.functional.noise_matching import add_noise
from flowalign.functional.transition import per_row
from flowalign.sampling.complete_states import take_rows
from flowalign.types import Cond, Trajectory, VelocityField
from flowalign.utils.seeds import generator


@dataclass(frozen=True)
class RenoisedBoundaries:
    """Boundaries after renoising, without gradient."""

    x0_hat: Float[Tensor, "n *latent"]
    """Predicted clean latents of each boundary."""
    noise: Float[Tensor, "n *latent"]
    """Total noise of each boundary after renoising, with unit variance."""
    fresh: Float[Tensor, "n *latent"]
    """Freshly drawn part of the noise."""
    t: Float[Tensor, "n"]
    """Noise level of each renoised boundary."""
    cond: Cond
    """Conditioning of each boundary."""

    @property
    def x(self) -> Float[Tensor, "n *latent"]:
        """Return the renoised states."""
        return add_noise(self.x0_hat, self.noise, self.t)

    def predicted(self, field: VelocityField) -> Float[Tensor, "n *latent"]:
        """Return the clean latents that a velocity field predicts."""
        x = self.x
        return x - per_row(self.t, x) * field.velocity(x, self.t, self.cond)


@dataclass(frozen=True)
class Boundaries:
    """Trajectories of one step on this process, with their boundaries."""

    trajectory: Trajectory
    """Deterministic trajectories with all their states."""
    first: int
    """Global position of this process's first sample."""
    above: bool
    """Whether boundaries are renoised up to the highest level instead of the start of their
    step."""

    @property
    def num_steps(self) -> int:
        """Return K, the number of boundaries of a trajectory."""
        return self.trajectory.num_steps

    def parts(self, size: int, samples: Int[Tensor, "m"]) -> Iterator[tuple[int, Int[Tensor, "n"]]]:
        """Yield each step with consecutive parts of some samples."""
        for k in range(self.num_steps):
            for part in samples.split(size):
                yield k, part

    def start(
        self, k: int, samples: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, ""], Cond]:
        """Return the states before step k, their noise level and their conditioning."""
        trajectory = self.trajectory
        rows = trajectory.prompt[samples].to(trajectory.device)
        return trajectory.state(k, samples), trajectory.sigmas[k], take_rows(trajectory.cond, rows)

    def velocity(self, k: int, samples: Int[Tensor, "n"]) -> Float[Tensor, "n *latent"]:
        """Return the velocity of step k."""
        trajectory = self.trajectory
        change = trajectory.state(k + 1, samples) - trajectory.state(k, samples)
        return change / (trajectory.sigmas[k + 1] - trajectory.sigmas[k])

    def renoised(
        self,
        k: int,
        samples: Int[Tensor, "n"],
        x0_hat: Float[Tensor, "n *latent"],
        noise: Float[Tensor, "n *latent"],
        key: tuple[int, str, int, int],
        shared: bool = False,
    ) -> RenoisedBoundaries:
        """Return boundary k of some samples after renoising.

        Draws depend on `key` and on the global position of the sample. If `shared` is set, they
        depend on the group instead of the sample.
        """
        trajectory = self.trajectory
        place = self.first + samples
        place = place // trajectory.group_size if shared else place
        seed, purpose, *index = key
        draws = [generator(seed, purpose, *index, k, int(i)) for i in place]
        uniform = torch.cat([torch.rand(1, generator=draw) for draw in draws])
        fresh = torch.stack([torch.randn(x0_hat.shape[1:], generator=draw) for draw in draws])
        m, sigmas = trajectory.sigmas[k + 1], trajectory.sigmas
        t = levels_above(uniform.to(x0_hat), m, sigmas[0] if self.above else sigmas[k])
        cond = take_rows(trajectory.cond, trajectory.prompt[samples].to(trajectory.device))
        fresh, data = fresh.to(x0_hat), x0_hat.detach()
        return RenoisedBoundaries(
            data, renoise_boundary(noise.detach(), fresh, m, t), fresh, t, cond
        )

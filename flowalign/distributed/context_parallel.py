"""Form groups of consecutive ranks that compute the same samples, each a part of the tokens.

In context parallelism by Ulysses (arXiv:2309.14509), every rank of a group holds a part of the
sequence. In attention, it holds the whole sequence for a part of the heads instead.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flowalign.distributed.collective_scheduler import CollectiveScheduler


@dataclass(frozen=True)
class Context:
    """Group of ranks that compute the same samples together."""

    degree: int
    """Number of ranks in the group."""
    place: int
    """Position of this rank in the group, from 0."""
    mesh: DeviceMesh
    """Device mesh of the group for diffusers, with the dimensions `ring` (size 1) and `ulysses`."""

    def sum_gradient(self, part: Tensor) -> Tensor:
        """Sum the parts of a gradient over the group in place, and return it."""
        dist.all_reduce(part, group=self.mesh["ulysses"].get_group())
        return part


def check_degree(degree: int, world: int, name: str = "context_degree") -> None:
    """Raise ValueError if the processes cannot be divided into groups of `degree`."""
    if world % degree:
        raise ValueError(
            f"sharding.{name} is {degree}, which does not divide the number of processes, {world}: "
            f"give it or --processes another value; allowed here: {list_divisors(world)}"
        )


def list_divisors(*numbers: int) -> str:
    """Return the common divisors of numbers as a text."""
    most = min(numbers)
    return ", ".join(str(d) for d in range(1, most + 1) if not any(n % d for n in numbers))


@cache
def form_context(degree: int, device: str, scheduler: CollectiveScheduler) -> Context:
    """Form groups of `degree` consecutive ranks and return this rank's; all ranks must call it."""
    groups = torch.arange(dist.get_world_size()).view(-1, degree).tolist()
    scheduler.form_context_groups(groups)
    shape, names = (len(groups), 1, degree), ("data", "ring", "ulysses")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    return Context(degree, dist.get_rank() % degree, mesh["ring", "ulysses"])

"""Let consecutive ranks compute the same samples together, each a part of the sequence of tokens.

In context parallelism by Ulysses (arXiv:2309.14509) every rank of a group holds a part of the
sequence everywhere but in attention, where it holds all of the sequence for a part of the heads.
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
    """Represents the group of ranks with which this one computes its samples."""

    degree: int
    """Number of ranks of the group."""
    place: int
    """Place of this rank in it, from 0."""
    mesh: DeviceMesh
    """The group as diffusers wants it: the dimensions `ring`, of one rank, and `ulysses`."""

    def sum_gradient(self, part: Tensor) -> Tensor:
        """Sum the parts of a gradient over the group in place, and return it."""
        dist.all_reduce(part, group=self.mesh["ulysses"].get_group())
        return part


def check_degree(degree: int, world: int) -> None:
    """Refuse groups that processes cannot form.

    Raises:
        ValueError: Processes would be left over.
    """
    if world % degree:
        raise ValueError(
            f"sharding.context_degree is {degree}, which does not divide the number of processes, "
            f"{world}: give it or --processes another value; allowed here: {list_divisors(world)}"
        )


def list_divisors(*numbers: int) -> str:
    """List the divisors that these numbers have in common."""
    most = min(numbers)
    return ", ".join(str(d) for d in range(1, most + 1) if not any(n % d for n in numbers))


@cache
def form_context(degree: int, device: str, scheduler: CollectiveScheduler) -> Context:
    """Form groups of so many consecutive ranks, as all ranks must, and return this rank's."""
    groups = torch.arange(dist.get_world_size()).view(-1, degree).tolist()
    scheduler.form_context_groups(groups)
    shape, names = (len(groups), 1, degree), ("data", "ring", "ulysses")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    return Context(degree, dist.get_rank() % degree, mesh["ring", "ulysses"])

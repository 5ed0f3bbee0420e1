"""Shard weights over processes by FSDP2, block by block.

FSDP2 is `torch.distributed.fsdp.fully_shard`, the second implementation of fully sharded data
parallelism (arXiv:2304.11277). Adapter parameters stay whole on every process, so gradients,
averages and checkpoints are the same as without sharding. If a whole network is trained, its
parameters, gradients, averages and moments are `DTensor`s.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flowalign.distributed.collective_scheduler import CollectiveScheduler, Evaluations
from flowalign.distributed.processes import Processes

PRECISION = MixedPrecisionPolicy(
    param_dtype=None, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
)
"""Precision policy: weights are gathered and used in their stored dtype, as without sharding, and
reductions are in float32."""


class Shards:
    """Networks with parameters sharded over groups of ranks; further networks can be added."""

    def __init__(self, processes: Processes, degree: int):
        assert processes.scheduler is not None, "processes that share weights have a scheduler"
        self.processes, self.scheduler = processes, processes.scheduler
        replicas = processes.world // degree
        names = "replicate", "shard"
        self.mesh = init_device_mesh(
            processes.device.type, (replicas, degree), mesh_dim_names=names
        )
        self.units: list[FSDPModule] = []
        ranks = torch.arange(processes.world).view(replicas, degree).tolist()
        self.scheduler.form_shard_groups(ranks)

    def add_all(self, networks: Sequence[tuple[nn.Module, Sequence[nn.Module]]]) -> None:
        """Shard the trained networks of a policy, which are paired with their blocks.

        Trained parameters stay whole if the network also has frozen ones. Networks may be in main
        memory; their blocks are moved one by one to the device of this process.
        """
        whole = [
            network
            for network, _ in networks
            if not _adapter_parameters(network) and _trained_parameters(network)
        ]
        for network, blocks in networks:
            self.add(network, blocks)
        if whole:
            self.scheduler.evaluations = Evaluations(whole[0])
            self.scheduler.replicas = self.mesh.get_group("replicate")

    def add(self, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Shard the parameters of a network while no rank computes; all ranks must call this."""
        adapter = _adapter_parameters(network)
        for p in adapter:
            p.data = p.data.to(self.processes.device)  # fully_shard does not move ignored params
        sharded = [
            fully_shard(
                unit,
                mesh=self.mesh["shard"],
                mp_policy=PRECISION,
                ignored_params=adapter,
                reshard_after_forward=True,  # also the root unit: other ranks may gather it again
            )
            for unit in (*blocks, network)
        ]
        first = len(self.units)
        self.units += sharded[-1:] + sharded[:-1]
        for number, unit in enumerate(self.units[first:], first):
            gather: Any = _AnnouncedGather(self.scheduler, number)
            unit.set_custom_all_gather(gather)
            unit.set_modules_to_backward_prefetch([unit])  # itself is gathered: prefetches nothing
            unit.set_gradient_divide_factor(1.0)  # sum gradients: each rank has a share of the loss
            unit.set_force_sum_reduction_for_comms(True)
        self.scheduler.joins = _joins_of(self.units)

    def copy_without_values(self, network: nn.Module) -> nn.Module:
        """Return a copy of a network without the values of its parameters."""
        return _copy_on(network, torch.device("meta"))

    def frozen_copy(
        self,
        network: nn.Module,
        empty: nn.Module,
        blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    ) -> nn.Module:
        """Return an equally sharded, frozen copy of a sharded network with its current weights.

        `empty` is a copy of the network without values. All ranks must call this.
        """
        self.processes.barrier()
        frozen = _copy_on(empty, torch.device("cpu"))
        self.add(frozen, blocks_of(frozen))
        with torch.no_grad():
            for own, p in zip(frozen.parameters(), network.parameters(), strict=True):
                own.copy_(p)
        return frozen


def _copy_on(network: nn.Module, device: torch.device) -> nn.Module:
    """Return a frozen copy with uninitialised parameters on `device`."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device=device), requires_grad=False)
        for p in network.parameters()
    }
    return copy.deepcopy(network, empty)


def _trained_parameters(network: nn.Module) -> set[nn.Parameter]:
    return {p for p in network.parameters() if p.requires_grad}


def _adapter_parameters(network: nn.Module) -> set[nn.Parameter]:
    """Return the trained parameters of a network that also has frozen ones; else an empty set."""
    trained = _trained_parameters(network)
    return trained if len(trained) < sum(1 for _ in network.parameters()) else set()


class _AnnouncedGather:
    """Default all-gather of FSDP2, delayed until all ranks are about to make it."""

    def __init__(self, scheduler: CollectiveScheduler, number: int):
        self.scheduler, self.number = scheduler, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a gathered unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather the parts of all ranks of the group."""
        backward = torch._C._current_graph_task_id() != -1
        self.scheduler.wait_to_gather(self.number, backward)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def _joins_of(units: Sequence[FSDPModule]) -> list[Callable[[], None]]:
    """Return a function per unit that takes part in its all-gather without computing with it."""
    owners: dict[nn.Parameter, tuple[FSDPModule, nn.Module, str]] = {}
    for unit in units:  # blocks come after their network, so they own their parameters
        for module in cast(nn.Module, unit).modules():
            for name, p in module.named_parameters(recurse=False):
                if isinstance(p, DTensor):
                    owners[p] = unit, module, name
    one = {unit: (module, name) for unit, module, name in owners.values()}
    return [
        partial(_join_all_gather, unit, *one[unit]) if unit in one else _nothing for unit in units
    ]


def _join_all_gather(unit: FSDPModule, module: nn.Module, name: str) -> None:
    # Reshard a gathered unit first: it would not gather again, and other ranks would wait forever.
    whole = not isinstance(getattr(module, name), DTensor)
    if whole:
        unit.reshard()
    unit.unshard()
    if not whole:
        unit.reshard()


def _nothing() -> None: ...

"""Shard weights over processes by FSDP2, block by block.

arXiv:2304.11277 describes fully sharded data parallelism; `torch.distributed.fsdp.fully_shard` is
its second implementation. The parameters of an adapter are left whole on every process, so
gradients, averages and checkpoints are those of an unsharded run. Where a whole network is trained,
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

from flowalign.distributed.collective_scheduler import CollectiveScheduler
from flowalign.distributed.evaluations import Evaluations
from flowalign.distributed.processes import Processes

PRECISION = MixedPrecisionPolicy(
    param_dtype=None, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
)
"""Weights are gathered as they are stored and computed with as in an unsharded run; reductions are
in float32."""


class Shards:
    """Holds networks whose parameters are divided over groups of ranks; copies can be added."""

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

    def add(self, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Shard the parameters of a network; all ranks must call this while none computes."""
        adapter = _adapter_parameters(network)
        for p in adapter:
            p.data = p.data.to(self.processes.device)  # what is ignored is not moved
        sharded = [
            fully_shard(
                unit,
                mesh=self.mesh["shard"],
                mp_policy=PRECISION,
                ignored_params=adapter,
                reshard_after_forward=True,  # of the whole network, too: others may need it
            )
            for unit in (*blocks, network)
        ]
        first = len(self.units)
        self.units += sharded[-1:] + sharded[:-1]
        for number, unit in enumerate(self.units[first:], first):
            gather: Any = _AnnouncedGather(self.scheduler, number)
            unit.set_custom_all_gather(gather)
            unit.set_modules_to_backward_prefetch([unit])  # gathered already, so: none
            unit.set_gradient_divide_factor(1.0)  # ranks have shares of a loss, so gradients add
            unit.set_force_sum_reduction_for_comms(True)
        self.scheduler.joins = _joins_of(self.units)

    def frozen_copy(
        self,
        network: nn.Module,
        empty: nn.Module,
        blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    ) -> nn.Module:
        """Return a frozen copy of a sharded network with its present weights, sharded equally.

        `empty` is a copy of the network without values. All ranks must call this.
        """
        self.processes.barrier()
        frozen = _copy_on(empty, torch.device("cpu"))
        self.add(frozen, blocks_of(frozen))
        with torch.no_grad():
            for own, p in zip(frozen.parameters(), network.parameters(), strict=True):
                own.copy_(p)
        return frozen


def shard(
    networks: Sequence[tuple[nn.Module, Sequence[nn.Module]]],
    processes: Processes,
    degree: int,
) -> Shards:
    """Shard the parameters of networks, each given with its blocks, over groups of ranks.

    Trained parameters of a network that has frozen ones stay whole. `degree` consecutive ranks
    share one copy. Networks may be in main memory: block after block moves to the device of this
    process.
    """
    shards = Shards(processes, degree)
    whole = [
        network
        for network, _ in networks
        if not _adapter_parameters(network) and _trained_parameters(network)
    ]
    for network, blocks in networks:
        shards.add(network, blocks)
    if whole:
        shards.scheduler.evaluations = Evaluations(whole[0])
        shards.scheduler.replicas = shards.mesh.get_group("replicate")
    return shards


def copy_without_values(network: nn.Module) -> nn.Module:
    """Return a copy of a network without the values of its parameters."""
    return _copy_on(network, torch.device("meta"))


def _copy_on(network: nn.Module, device: torch.device) -> nn.Module:
    """Return a frozen copy whose parameters have no values, but memory on this device."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device=device), requires_grad=False)
        for p in network.parameters()
    }
    return copy.deepcopy(network, empty)


def _trained_parameters(network: nn.Module) -> set[nn.Parameter]:
    return {p for p in network.parameters() if p.requires_grad}


def _adapter_parameters(network: nn.Module) -> set[nn.Parameter]:
    """Return the trained parameters of a network that has frozen ones."""
    trained = _trained_parameters(network)
    return trained if len(trained) < sum(1 for _ in network.parameters()) else set()


class _AnnouncedGather:
    """Gathers a unit as FSDP2 does by default, once all ranks are about to."""

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
    """Return a function per unit that takes part in its all-gather, without computing with it."""
    owners: dict[nn.Parameter, tuple[FSDPModule, nn.Module, str]] = {}
    for unit in units:  # blocks come after the network that holds them, and keep what is theirs
        for module in cast(nn.Module, unit).modules():
            for name, p in module.named_parameters(recurse=False):
                if isinstance(p, DTensor):
                    owners[p] = unit, module, name
    one = {unit: (module, name) for unit, module, name in owners.values()}
    return [
        partial(_join_all_gather, unit, *one[unit]) if unit in one else _nothing for unit in units
    ]


def _join_all_gather(unit: FSDPModule, module: nn.Module, name: str) -> None:
    # A unit that is whole already would not gather again, and the other ranks would wait forever.
    whole = not isinstance(getattr(module, name), DTensor)
    if whole:
        unit.reshard()
    unit.unshard()
    if not whole:
        unit.reshard()


def _nothing() -> None: ...

"""Coordinate processes: ranks and devices, gathering small tensors, summing gradients.

Code that divides samples and gathers results treats a group of ranks with the same samples
(`flowalign.distributed.context_parallel`) as one process. `rank` and `world` count such groups, and
the first rank of a group contributes for the whole group.

Before an update, one `all_reduce` sums the concatenated gradients. Adapters are small, so
overlapping gains little, and DDP expects equal numbers of backward passes, which uneven shares of
prompts and dropped samples break.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import TypeIs

from flowalign.distributed.collective_scheduler import SOON, CollectiveScheduler, expect_all_ranks
from flowalign.distributed.context_parallel import Context, check_degree, form_context
from flowalign.distributed.launch import STORE
from flowalign.utils.console import Patience, say

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Processes:
    """This process among its peers; every process must make all collective calls."""

    rank: int
    """Index of this process, or of its context group, among the ones with different samples."""
    world: int
    """Number of processes, or context groups, with different samples."""
    device: torch.device
    scheduler: CollectiveScheduler | None = None
    """Scheduler of collective calls between ranks; None for a single process."""
    context: Context | None = None
    """Ranks that compute the same samples together; None: every rank computes its own samples."""

    @property
    def is_main(self) -> bool:
        """Return whether this process writes files and reports progress."""
        return self.rank == 0 and self.is_leader

    @property
    def is_leader(self) -> bool:
        """Return whether this rank is the first of its context group."""
        return self.context is None or self.context.place == 0

    @property
    def ranks(self) -> int:
        """Return the total number of ranks."""
        return self.world * (self.context.degree if self.context else 1)

    @property
    def ungrouped(self) -> "Processes":
        """Return this rank among all ranks, for work that is not shared with its context group."""
        if self.context is None:
            return self
        rank = self.rank * self.context.degree + self.context.place
        return replace(self, rank=rank, world=self.ranks, context=None)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's consecutive part of a list; parts are in rank order."""
        bounds = [len(items) * r // self.world for r in range(self.world + 1)]
        return items[bounds[self.rank] : bounds[self.rank + 1]]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate over ranks on the CPU along the first axis, which may differ in length."""
        if self.ranks == 1:
            return tensor.cpu()
        return torch.cat(self._gather_objects("gather", tensor.detach().cpu()))

    def sum_by_name(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Sum over ranks by name; every rank must call this, also a rank without values."""
        parts = self._gather_objects("sum_by_name", dict(mine))
        names = sorted({name for part in parts for name in part})
        return {name: sum(part.get(name, 0.0) for part in parts) for name in names}

    def merge(self, mine: Mapping[K, T]) -> dict[K, T]:
        """Return the union over ranks; the lowest rank with a key sets its value on all ranks."""
        parts = self._gather_objects("merge", dict(mine))
        return {key: value for part in reversed(parts) for key, value in part.items()}

    def broadcast_first(self, value: T) -> T:
        """Return the value of the first rank of the context group."""
        if self.context is None:
            return value
        assert self.scheduler is not None, "ranks that compute together have a scheduler"
        return self.scheduler.broadcast_first(value)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass when all ranks that share trained weights begin."""
        return self.scheduler.before_backward(loss) if self.scheduler else loss

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over ranks in one flat reduction; a missing gradient counts as 0.

        Gradients of sharded parameters are already summed over the ranks that share them. Ranks of
        a context group have partial gradients, which add up to the gradient.
        """
        if self.ranks == 1:
            return
        parameters = list(parameters)
        # Wait first: meanwhile this rank may still take part in backward passes of other ranks,
        # which add to its gradients.
        self._wait_for_all("sum_gradients")
        group = self.scheduler.replicas if self.scheduler else None
        if group and dist.get_world_size(group) == 1:
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [local_part(p.grad) for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        with expect_all_ranks():
            dist.all_reduce(flat, group=group)
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of gradients over all ranks in place, and return it."""
        if self.ranks > 1:
            self._wait_for_all("sum")
            with expect_all_ranks():
                dist.all_reduce(tensor)
        return tensor

    def max_rank_difference(self, parameters: Iterable[nn.Parameter]) -> float:
        """Return the largest difference of a parameter's sum between ranks; 0 for equal weights."""
        if self.ranks == 1:
            return 0.0
        self._wait_for_all("max_rank_difference")
        sums = torch.stack([gather_whole(p.detach()).double().sum() for p in parameters])
        gathered = self.ungrouped.gather(sums[None].cpu())
        return float((gathered.amax(0) - gathered.amin(0)).max())

    def barrier(self) -> None:
        """Wait for all other processes."""
        if self.ranks > 1:
            self._wait_for_all("barrier")
            with expect_all_ranks():
                dist.barrier()

    def _gather_objects(self, call: str, mine: T) -> list[T]:
        """Return the objects of the first rank of every context group, in rank order."""
        if self.ranks == 1:
            return [mine]
        parts: list[Any] = [None] * self.ranks
        self._wait_for_all(call)
        with expect_all_ranks():
            dist.all_gather_object(parts, mine if self.is_leader else None)
        return parts[:: self.ranks // self.world]

    def _wait_for_all(self, call: str) -> None:
        if self.scheduler:
            self.scheduler.wait_for_all(call)


def take_turns(processes: Processes) -> Iterator[None]:
    """Yield once, while no other process of this machine is in its turn; all must call this."""
    assert processes.scheduler is not None, "processes that share weights have a scheduler"
    place = int(os.environ.get("LOCAL_RANK", 0))
    last = int(processes.ungrouped.gather(torch.tensor([place])).max())
    for turn in range(last + 1):
        if turn == place:
            yield
        processes.scheduler.wait_for_turn()


def is_sharded(tensor: Tensor) -> "TypeIs[DTensor]":
    """Return whether this rank holds only a part of a tensor."""
    from torch.distributed.tensor import DTensor  # takes a second to import

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, with shared memory, or an unsharded tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; all ranks that share it must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


ALONE = Processes(0, 1, torch.device("cpu"))
"""A single process on the CPU, for work that needs no device."""


def check_fits(processes: int, device: str = "auto") -> None:
    """Raise ValueError for more processes than GPUs, or than CPU cores if `device` is the CPU."""
    on_gpu = _device_type(device) == "cuda"
    most = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
    if processes > most:
        raise ValueError(
            f"--processes is {processes}, but this machine has {most} "
            f"{'GPU' if on_gpu else 'CPU core'}{'s' * (most > 1)}; give at most {most}"
        )


def join(device: str = "auto", context_degree: int = 1) -> Processes:
    """Join the processes that the launcher or torchrun started, or run as a single process.

    `context_degree` consecutive ranks compute the same samples together.

    Raises:
        ValueError: The device is not available, or the degree does not divide the number of ranks.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, kind = int(os.environ.get("LOCAL_RANK", 0)), _device_type(device)
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if world > 1 and "RANK" not in os.environ:
        remedy = "a launcher sets both; for one process unset WORLD_SIZE"
        raise ValueError(f"WORLD_SIZE is {world}, but RANK is not set: {remedy}")
    check_degree(context_degree, world)
    if kind == "cuda":
        torch.cuda.set_device(chosen)
    if world == 1:
        return Processes(rank, world, chosen)
    if not dist.is_initialized():
        _meet(chosen, rank, world)
    scheduler = _start_scheduler()
    if context_degree == 1:
        return Processes(rank, world, chosen, scheduler)
    context = form_context(context_degree, kind, scheduler)
    groups = rank // context_degree, world // context_degree
    return Processes(*groups, chosen, scheduler, context)


def _meet(device: torch.device, rank: int, world: int) -> None:
    """Form the default process group through the file or the address that the launcher has set."""
    # NCCL would guess the device of a rank in its first barrier, and may hang if it is wrong.
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    options: dict[str, Any] = {"rank": rank, "world_size": world, "device_id": own}
    if file := os.environ.get(STORE):
        options["store"] = dist.FileStore(file, world)
        options["store"].set_timeout(SOON)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    errors: list[Exception] = []

    def work() -> None:
        try:
            if own:
                torch.cuda.set_device(own)  # every thread has its own current device
            dist.init_process_group(backend, timeout=SOON, **options)
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    meeting = threading.Thread(target=work, daemon=True)
    with Patience(f"all {world} processes" + ("" if file else f" to meet at {where}"), say):
        meeting.start()
        while meeting.is_alive():  # signals act between these calls, and not inside of torch's
            meeting.join(0.05)
    for error in errors:
        raise error


@cache
def _start_scheduler() -> CollectiveScheduler:
    """Return the scheduler that all calls share."""
    return CollectiveScheduler()


def _device_type(device: str) -> str:
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device; allowed here: auto, cpu")
    return kind

"""Coordinate processes: ranks and devices, gathering small tensors, summing gradients."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from flowalign.distributed.failures import FOLDER
from flowalign.distributed.heartbeat import Heartbeat
from flowalign.distributed.rendezvous import SOON, Rendezvous

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Processes:
    """Represents this process among its peers; every process must make all collective calls."""

    rank: int
    world: int
    device: torch.device
    rendezvous: Rendezvous | None = None
    """Where ranks wait for one another before a collective call; None: only in the call itself."""

    @property
    def is_main(self) -> bool:
        """Return whether this process writes files and reports progress."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's consecutive part of a list; in rank order the parts give the list."""
        bounds = [len(items) * r // self.world for r in range(self.world + 1)]
        return items[bounds[self.rank] : bounds[self.rank + 1]]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate over ranks on the CPU, along the first axis, which may differ in length."""
        if self.world == 1:
            return tensor.cpu()
        parts: list[Tensor] = [torch.empty(0)] * self.world
        self._meet("gather")
        dist.all_gather_object(parts, tensor.detach().cpu())
        return torch.cat(parts)

    def total(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Sum over ranks by name; a rank with nothing to add under a name still takes part."""
        parts: list[Mapping[str, float]] = [mine]
        if self.world > 1:
            parts = [{}] * self.world
            self._meet("total")
            dist.all_gather_object(parts, dict(mine))
        names = sorted({name for part in parts for name in part})
        return {name: sum(part.get(name, 0.0) for part in parts) for name in names}

    def merged(self, mine: Mapping[K, T]) -> dict[K, T]:
        """Return the union over ranks, the same on all; the lowest rank with a key sets it."""
        parts: list[Mapping[K, T]] = [mine]
        if self.world > 1:
            parts = [{}] * self.world
            self._meet("merged")
            dist.all_gather_object(parts, dict(mine))
        return {key: value for part in reversed(parts) for key, value in part.items()}

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss to go backward from, once all ranks that share trained weights begin."""
        return self.rendezvous.before_backward(loss) if self.rendezvous else loss

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over ranks in one flat reduction; a parameter without one counts as 0.

        Those of sharded parameters are summed over the ranks that share them already.
        """
        if self.world == 1:
            return
        parameters = list(parameters)
        self._meet("sum_gradients")  # first, because this rank may still add to others' passes
        group = self.rendezvous.replicas if self.rendezvous else None
        if group and dist.get_world_size(group) == 1:
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=group)
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks in place, and return it."""
        if self.world > 1:
            self._meet("sum")
            dist.all_reduce(tensor)
        return tensor

    def max_rank_difference(self, parameters: Iterable[nn.Parameter]) -> float:
        """Return the largest difference of a parameter's sum between ranks, 0 for equal weights."""
        if self.world > 1:
            self._meet("max_rank_difference")
        sums = torch.stack([whole(p.detach()).double().sum().cpu() for p in parameters])
        gathered = self.gather(sums[None])
        return float((gathered.amax(0) - gathered.amin(0)).max())

    def barrier(self) -> None:
        """Wait for all other processes."""
        if self.world > 1:
            self._meet("barrier")
            dist.barrier()

    def _meet(self, call: str) -> None:
        if self.rendezvous:
            self.rendezvous.meet(call)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from the ranks that share it, all of which must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


ALONE = Processes(0, 1, torch.device("cpu"))
"""A single process on the CPU, for work that needs no device."""


def check_fits(processes: int, device: str = "auto") -> None:
    """Refuse more processes than this machine has GPUs, or cores where it computes on the CPU."""
    on_gpu = _kind(device) == "cuda"
    most = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
    if processes > most:
        raise ValueError(
            f"--processes is {processes}, but this machine has {most} "
            f"{'GPU' if on_gpu else 'CPU core'}{'s' * (most > 1)}; give at most {most}"
        )


def join(device: str = "auto") -> Processes:
    """Join the processes that the launcher or torchrun started with this one, or run alone."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, kind = int(os.environ.get("LOCAL_RANK", 0)), _kind(device)
    chosen = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        folder = os.environ.get(FOLDER)  # torchrun announces a port instead
        store = dist.FileStore(str(Path(folder) / "store"), world) if folder else None
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=SOON, store=store, rank=rank, world_size=world)
        Heartbeat(distributed_c10d._get_default_store(), rank, world).start()
    return Processes(rank, world, chosen, _rendezvous() if world > 1 else None)


@cache
def _rendezvous() -> Rendezvous:
    return Rendezvous()


def _kind(device: str) -> str:
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device cuda was asked for, but torch sees no CUDA device; allowed here: auto, cpu"
        )
    return kind

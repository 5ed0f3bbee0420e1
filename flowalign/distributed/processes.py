"""The few lines that know about processes: who I am, gathering small tensors, summing gradients."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
K = TypeVar("K")
_PATIENCE = timedelta(hours=24)
"""Of collective calls: a rank may encode for hours; where one dies, torchrun ends all."""


@dataclass(frozen=True)
class Processes:
    """This process among its peers. All collective calls must be made by every process."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the person."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """My consecutive part of a list, as even as it gets; parts in rank order give the list."""
        bounds = [len(items) * r // self.world for r in range(self.world + 1)]
        return items[bounds[self.rank] : bounds[self.rank + 1]]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenation over ranks along the first axis, which may differ in length; on the CPU."""
        if self.world == 1:
            return tensor.cpu()
        parts: list[Tensor] = [torch.empty(0)] * self.world
        dist.all_gather_object(parts, tensor.detach().cpu())
        return torch.cat(parts)

    def total(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Sum over ranks by name; a rank that has nothing to add under a name still takes part."""
        parts: list[Mapping[str, float]] = [mine]
        if self.world > 1:
            parts = [{}] * self.world
            dist.all_gather_object(parts, dict(mine))
        names = sorted({name for part in parts for name in part})
        return {name: sum(part.get(name, 0.0) for part in parts) for name in names}

    def merged(self, mine: Mapping[K, T]) -> dict[K, T]:
        """Union over ranks, the same on all; the first rank that has a key says its value."""
        parts: list[Mapping[K, T]] = [mine]
        if self.world > 1:
            parts = [{}] * self.world
            dist.all_gather_object(parts, dict(mine))
        return {key: value for part in reversed(parts) for key, value in part.items()}

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up gradients over ranks in one flat reduction; where one is unused it counts as 0."""
        if self.world == 1:
            return
        parameters = list(parameters)
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))

    def spread(self, parameters: Iterable[nn.Parameter]) -> float:
        """Largest difference of a parameter's sum between ranks: 0 while weights are equal."""
        sums = torch.stack([p.detach().double().sum().cpu() for p in parameters])
        everyone = self.gather(sums[None])
        return float((everyone.amax(0) - everyone.amin(0)).max())

    def barrier(self) -> None:
        """Wait for the others."""
        if self.world > 1:
            dist.barrier()


ALONE = Processes(0, 1, torch.device("cpu"))
"""A single process, for what needs no device."""


def join(device: str = "auto") -> Processes:
    """Join the process group that torchrun announces in the environment, or stand alone."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device cuda was asked for, but torch sees no CUDA device; allowed here: auto, cpu"
        )
    chosen = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=_PATIENCE)
    return Processes(rank, world, chosen)

"""Write and read sharded tensors with `torch.distributed.checkpoint`.

It writes one file per process. Any number of processes can read the files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from flowalign.utils.imports import LazyModule

if TYPE_CHECKING:
    from torch.distributed import checkpoint
    from torch.distributed import tensor as dtensor
    from torch.distributed.checkpoint import metadata
else:
    checkpoint = LazyModule("torch.distributed.checkpoint")
    dtensor = LazyModule("torch.distributed.tensor")
    metadata = LazyModule("torch.distributed.checkpoint.metadata")

FOLDER = "sharded"
"""Folder of the sharded files inside a checkpoint's `state`."""


def save_sharded(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors; all processes must call this."""
    checkpoint.save(dict(tensors), checkpoint_id=folder)


def shapes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and shape of every written tensor."""
    found = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (about.properties.dtype, about.size)
        for name, about in found.items()
        if isinstance(about, metadata.TensorStorageMetadata)
    }


def read_sharded(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read all tensors in `like`, each sharded like its counterpart there.

    All processes must call this.
    """
    made = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    checkpoint.load(made, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return made


def divided(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return a tensor sharded like `like`; scalars and tensors without a shard stay whole."""
    if not isinstance(like, dtensor.DTensor) or tensor.dim() == 0:
        return tensor
    return dtensor.distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)

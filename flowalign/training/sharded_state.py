"""Write and read sharded tensors with `torch.distributed.checkpoint`.

It writes one file per process. Any number of processes can read the files.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

FOLDER = "sharded"
"""Folder of the sharded files inside a checkpoint's `state`."""


def save_sharded(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors; all processes must call this."""
    dcp.save(dict(tensors), checkpoint_id=folder)


def shapes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and shape of every written tensor."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (about.properties.dtype, about.size)
        for name, about in found.items()
        if isinstance(about, TensorStorageMetadata)
    }


def read_sharded(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read all tensors in `like`, each sharded like its counterpart there.

    All processes must call this.
    """
    made = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    dcp.load(made, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return made


def divided(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return a tensor sharded like `like`; scalars and tensors without a shard stay whole."""
    if not isinstance(like, DTensor) or tensor.dim() == 0:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)

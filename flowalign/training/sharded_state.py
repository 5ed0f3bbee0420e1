"""Write and read trained tensors that are divided among processes, by torch's DCP.

`torch.distributed.checkpoint` writes a file per process; another number of processes, or one, reads
what it needs of them.
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
"""Folder of these files inside a checkpoint's `state`."""


def save_sharded(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors; all processes must call this."""
    dcp.save(dict(tensors), checkpoint_id=folder)


def shapes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return type and shape of every tensor that was written."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (about.properties.dtype, about.size)
        for name, about in found.items()
        if isinstance(about, TensorStorageMetadata)
    }


def read_sharded(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read all tensors, each divided as its counterpart in `like` is; all processes must call this.

    `like` has every name that is read.
    """
    made = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    dcp.load(made, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return made


def divided(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return a whole tensor divided as another is, if it is; a single number stays whole."""
    if not isinstance(like, DTensor) or tensor.dim() == 0:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)

"""Counts and gathers the weights of sharded networks."""

from typing import Any

import torch
from torch import Tensor, nn

from pipelines.network.speed import blocks_of
from pipelines.parts.libraries import fsdp, state_dict


def count_gathered(network: Any) -> int:
    """Count the parameters of the largest block and of all layers outside the blocks."""
    blocks = blocks_of(network)  # those of a UNet lie in one another
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = sum(p.numel() for p in network.parameters() if id(p) not in inside)
    return outside + max((sum(p.numel() for p in one.parameters()) for one in blocks), default=0)


def gather_whole(network: Any) -> Any:
    """Return a network with all its weights: itself or, if it is sharded, a copy in main memory.

    All processes must call this for a sharded network. Only the first process gets the copy; the
    other processes get None.
    """
    module: nn.Module = network
    if not isinstance(module, fsdp.FSDPModule):
        return network
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = state_dict.get_model_state_dict(network, options=options)
    if not state:
        return None
    own = type(network).__bases__[1]  # FSDP2 makes a subclass of (FSDPModule, own)
    with torch.device("meta"):
        made = own.from_config(network.config)
    made.load_state_dict(state, assign=True)
    return made


def load_whole(network: Any, state: dict[str, Tensor]) -> None:
    """Load all weights of a network that may be sharded."""
    module: nn.Module = network
    if isinstance(module, fsdp.FSDPModule):
        options = state_dict.StateDictOptions(full_state_dict=True)
        state_dict.set_model_state_dict(network, dict(state), options=options)
    else:
        network.load_state_dict(state)

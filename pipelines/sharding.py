"""Tells which networks and blocks of a pipeline of diffusers are sharded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from flowalign.types import Shardable
from pipelines.speed import blocks_of


class ShardablePolicy(Shardable):
    """Gives the networks of a `DiffusersPolicy`, which is one of these, to be sharded."""

    replays_at_load: bool = False
    """Whether `load` evaluates the network, which is not sharded then."""

    def check_sharding(self: Any) -> None:
        if self.lora is None and (len(self.parts) > 1 or self.precision == "fp16"):
            raise ValueError(
                "sharding.weights blocks trains the whole of one network in fp32 or bf16; with "
                f"{len(self.parts)} of them in {self.precision} set policy.lora"
            )
        if self.replays_at_load:
            raise ValueError(
                f"sharding.weights blocks needs a policy that does not compute while it loads, and "
                f"{type(self).__name__} replays its pipeline then; use the policy of the family"
            )

    def networks(self: Any) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        parts = [self.pipe.components[part] for part in self.parts]
        return [(part, self.blocks(part)) for part in parts]

    def blocks(self, network: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(network)


def gathered_parameters(network: Any) -> int:
    """Count the parameters of the largest block and of what is around the blocks."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks_of(network)]
    total = sum(p.numel() for p in network.parameters())
    return total - sum(sizes) + max(sizes, default=0)


def whole(network: Any) -> Any:
    """Return a network with all its weights: itself or, if it is sharded, a copy in main memory.

    Of a sharded network all processes must call this, and those after the first get None.
    """
    module: nn.Module = network
    if not isinstance(module, FSDPModule):
        return network
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(network, options=options)
    if not state:
        return None
    own = type(network).__bases__[1]  # beside FSDPModule, of which FSDP2 makes a class
    with torch.device("meta"):
        made = own.from_config(network.config)
    made.load_state_dict(state, assign=True)
    return made


def set_whole(network: Any, state: dict[str, Tensor]) -> None:
    """Load all weights of a network, which may be sharded."""
    module: nn.Module = network
    if isinstance(module, FSDPModule):
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(network, dict(state), options=options)
    else:
        network.load_state_dict(state)

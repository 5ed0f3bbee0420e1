"""Tells which networks and blocks of a pipeline of diffusers are sharded."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from flowalign.types import Shardable
from pipelines.speed import blocks_of


class ShardablePolicy(Shardable):
    """Gives the networks of a `DiffusersPolicy`, which is one of these, to be sharded."""

    replays_at_load: bool = False
    """Whether `load` evaluates the network, which is not sharded then."""

    def check_sharding(self: Any) -> None:
        if self.lora is None:
            raise ValueError(
                "sharding.weights blocks is for an adapter on a frozen network, and policy.lora is "
                "null, which trains all of it: set policy.lora, or leave sharding out"
            )

        if self.replays_at_load:
            raise ValueError(
                f"sharding.weights blocks needs a policy that does not compute while it loads, and "
                f"{type(self).__name__} replays its pipeline then; use the policy of the family"
            )

    def networks(self: Any) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        parts = [self.pipe.components[part] for part in self.parts]
        return [(part, blocks_of(part)) for part in parts]


def gathered_parameters(network: Any) -> int:
    """Count the parameters of the largest block and of what is around the blocks."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks_of(network)]
    total = sum(p.numel() for p in network.parameters())
    return total - sum(sizes) + max(sizes, default=0)

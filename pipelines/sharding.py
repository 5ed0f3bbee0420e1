"""Tells which networks and blocks of a pipeline of diffusers are sharded."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from flowalign.types import Shardable
from pipelines.speed import blocks_of


class ShardablePolicy(Shardable):
    """Gives the networks of a `DiffusersPolicy`, which is one of these, to be sharded."""

    def check_sharding(self: Any) -> None:
        if self.lora is None:
            raise ValueError(
                "sharding.weights blocks is for an adapter on a frozen network, and policy.lora is "
                "null, which trains all of it: set policy.lora, or leave sharding out"
            )

    def networks(self: Any) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        parts = [self.pipe.components[part] for part in self.parts]
        return [(part, blocks_of(part)) for part in parts]

"""Define how weights are divided among processes, and the interface of policies whose are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from flowalign.utils.ranges import PositiveInt


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Divides weights among processes; what is computed does not change."""

    weights: Literal["replicated", "blocks"] = "replicated"
    """replicated: every process holds the whole network. blocks: each holds a part of every block,
    and all gather a block when one of them computes it, by FSDP2 of torch (arXiv:2304.11277)."""
    shard_degree: PositiveInt | None = None
    """Number of consecutive processes that share one copy, such as those of one machine (hybrid
    sharding); it divides the number of processes. Null: all share one."""

    def __post_init__(self) -> None:
        """Reject a degree of nothing."""
        if self.shard_degree and self.weights == "replicated":
            raise ValueError(
                f"sharding.shard_degree is {self.shard_degree}, but sharding.weights is "
                "replicated; set it to blocks, or leave both out"
            )


class Shardable(ABC):
    """Marks a `Policy` whose weights can be sharded."""

    loads_to_cpu: bool = False
    """Whether `load` leaves the trained networks in main memory, from where they are sharded."""

    twin: Callable[[], nn.Module] | None = None
    """Makes a frozen copy of the denoiser as it is now, sharded like it, where all of it is trained
    and sharded; all processes must call it. None: weights are whole."""

    @abstractmethod
    def check_sharding(self) -> None:
        """Raise ValueError if the weights of this policy cannot be sharded; reads none."""

    @abstractmethod
    def networks(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Return the loaded trained networks, each with its `blocks`."""

    @abstractmethod
    def blocks(self, network: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks that one of these networks, or a copy, repeats."""
